"""What the pages show does what they say, and their pictures and links exist."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric.data")  # here: its import gives warnings of its own
import torch

from flt_mol.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# Run in order, with their commands, in tests/training/test_pages.py.
IN_A_FOLDER = ("train", "finetune", "checkpoints")


@pytest.fixture
def _quick_compiler(monkeypatch):
    """Compiled blocks without a C++ compiler: what is shown must be one graph all the same."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: real(*a, backend="aot_eager", **k))
    torch._dynamo.reset()


COMMANDS_TOO = {"predict"}  # pages whose commands work on what their Python blocks have written


@pytest.mark.usefixtures("_quick_compiler")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in IN_A_FOLDER], ids=lambda page: page.stem
)
def test_every_block_runs_and_prints_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    with torch.random.fork_rng(devices=[]):
        names = {"__name__": page.stem}
        for kind, block in re.findall(r"```(python|bash)\n(.*?)```", text, flags=re.DOTALL):
            if kind == "python":
                exec(compile(block, page.name, "exec"), names)
                promised = re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
                assert capsys.readouterr().out.splitlines() == promised
            elif page.stem in COMMANDS_TOO:
                run_commands(block)
                capsys.readouterr()


def run_commands(block):
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "flt-mol", line
        assert main(arguments) == 0, line


def test_there_are_pages_with_blocks():
    if not DOCS.is_dir():
        pytest.skip("needs the checkout")
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert text.count("```python") > 10


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_pictures_are_small_and_shown():
    shown = "".join(page.read_text("utf-8") for page in PAGES)
    for picture in (DOCS / "images").glob("*"):
        assert picture.stat().st_size < 150_000
        assert f"images/{picture.name}" in shown
