"""Every command of these pages runs, in order, and the table shown is what is printed."""

import re
import shlex
from pathlib import Path

import pytest

from flt_mol.cli import main
from flt_mol.files import shipped_folder

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("evaluate", "submit")


def blocks(page, language):
    path = DOCS / f"{page}.md"
    if not path.is_file():
        pytest.skip("needs the checkout")
    return re.findall(rf"```{language}\n(.*?)```", path.read_text("utf-8"), flags=re.DOTALL)


def cells(line):
    return re.findall(r"[^\s\[\],]+", line)


@pytest.mark.parametrize("page", PAGES)
def test_commands(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "datasets").symlink_to(shipped_folder("datasets"))
    monkeypatch.chdir(tmp_path)
    printed = ""
    commands = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert len(commands) > 2
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "flt-mol"
        assert main(arguments) == 0, capsys.readouterr().err
        printed += capsys.readouterr().out
    if page == "evaluate":
        (shown,) = blocks(page, "text")
        for promised, line in zip(shown.splitlines(), printed.splitlines(), strict=False):
            for wanted, cell in zip(cells(promised), cells(line), strict=True):
                if re.fullmatch(r"\d+\.\d+", wanted):  # machines round differently
                    assert float(cell) == pytest.approx(float(wanted), rel=0.02)
                else:
                    assert cell == wanted
