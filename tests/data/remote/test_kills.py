"""Downloads killed at any moment, by the script that shows it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from flt_mol.testing import killing

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "kill_download.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    if not SCRIPT.is_file():
        pytest.skip("needs the checkout")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(end.value.code or 0)


SMALL = ("--kills", "3", "--size", "300000", "--rate", "1e6")


def test_three_kills(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[4].strip() for line in lines[2:5]] == ["yes"] * 3
    assert lines[-1] == "3 kills, 0 results that differ from an undisturbed download"


def test_a_difference_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [killing.Killed(0.5, "nothing", 10, same) for same in (True, False)]
    monkeypatch.setattr(killing, "kill_downloads", lambda *_, **__: rows)
    assert run(monkeypatch) == 1
    assert "2 kills, 1 results that differ" in capsys.readouterr().out


def test_contents_tell_files_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, data in (("a/x", b"1"), (".hidden", b"1"), ("y", b"2")):
        (tmp_path / name).write_bytes(data)
    found = killing.contents(tmp_path)
    assert list(found) == [".hidden", "a/x", "y"]
    assert found["a/x"] == found[".hidden"] != found["y"]
