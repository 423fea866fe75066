"""The blocks of the README and of these pages run, in order, and print what the pages show."""

import re
import shlex
from pathlib import Path

import pytest

from flt_mol.cli import main
from flt_mol.files import shipped_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def blocks(page, *languages):
    path = ROOT / page
    if not path.is_file():
        pytest.skip("needs the checkout")
    found = re.findall(r"```(\w+)\n(.*?)```", path.read_text("utf-8"), flags=re.DOTALL)
    return [(language, text) for language, text in found if language in languages]


def cells(line):
    return re.findall(r"[^\s\[\],]+", line)


def agree(shown, printed):
    """Whether a line is what a page shows; machines round differently."""
    assert len(cells(shown)) == len(cells(printed)), (shown, printed)
    for wanted, cell in zip(cells(shown), cells(printed), strict=True):
        if re.fullmatch(r"-?\d+\.\d*", wanted):
            assert float(cell) == pytest.approx(float(wanted), rel=0.02, abs=0.011)
        else:
            assert cell == wanted


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{x.stem}.md" for x in sorted((ROOT / "docs").glob("*.md"))),
    ],
)
@pytest.mark.filterwarnings("default")
def test_blocks_run_and_print_what_the_page_shows(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "datasets").symlink_to(shipped_folder("datasets"))
    monkeypatch.chdir(tmp_path)
    names, printed = {"__name__": "page"}, ""
    for language, text in blocks(page, "python", "bash"):
        if language == "python":
            exec(compile(text, page, "exec"), names)
            lines = capsys.readouterr().out.splitlines()
            shown = re.findall(r"^print\(.*\)  # (.*)$", text, flags=re.MULTILINE)
            for wanted, line in zip(shown, lines if shown else [], strict=True):
                agree(wanted, line)
            continue
        for line in text.splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "flt-mol":
                status = main(arguments)
                out, error = capsys.readouterr()
                assert status == 0, error
                printed += out
    if page == "docs/evaluate.md":
        ((_, table),) = blocks(page, "text")
        for shown, line in zip(table.splitlines(), printed.splitlines(), strict=False):
            agree(shown, line)
