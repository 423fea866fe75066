"""The pages on training, fine-tuning and checkpoints: every block runs, in order, in one folder."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from flt_mol.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", flags=re.DOTALL)


def run_commands(block):
    for line in block.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "flt-mol"
        assert main(arguments) == 0, line


def write_file(block):
    name = re.match(r"# (\S+\.yaml)\n", block).group(1)
    Path(name).write_text(block, encoding="utf-8")
    assert main(["train", name, "training.epochs=1"]) == 0


@pytest.mark.parametrize("page", ["train", "finetune", "checkpoints"])
def test_every_block_runs(page, tmp_path, monkeypatch, capsys):
    if not DOCS.is_dir():
        pytest.skip("needs the checkout")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text("utf-8"))
    names = {"__name__": page}
    with torch.random.fork_rng(devices=[]):
        for language, block in blocks:
            capsys.readouterr()
            if language == "bash":
                run_commands(block)
            elif language == "yaml":
                write_file(block)
            elif language == "python":
                exec(compile(block, page, "exec"), names)
                promised = re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
                lines = capsys.readouterr().out.splitlines()
                assert lines[len(lines) - len(promised) :] == promised
    assert {language for language, _ in blocks} >= {"python", "bash"}
