"""Files where nothing may be written, and files that are cut off or something else: every kind."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing.cases import Case
from fuzzing.run import run
from fuzzing.sound import SOUND, sound

from flt_mol.data import open_dataset

# Reads a copy of each file, so that all modules are there, and then without root's rights, which
# know no read-only folders, the files themselves.
READ = """
import os, sys, warnings
from pathlib import Path
from flt_mol.data import open_dataset

warnings.simplefilter("ignore")
copies, folder = map(Path, sys.argv[1:])
for path in copies.iterdir():
    list(open_dataset(path))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
assert not os.access(folder, os.W_OK)
for path in folder.iterdir():
    print(path.name, len(list(open_dataset(path))))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody can read; pytest's are for its user alone."""
    path = Path(tempfile.mkdtemp(prefix="readonly"))
    path.chmod(0o755)
    yield path
    for inside in path.glob("**/"):
        inside.chmod(0o755)
    shutil.rmtree(path)


def _write_ahead(path: Path) -> None:
    """Let SQLite keep a log beside the file, as databases that are written by many do."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    connection.close()


def _lock(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.chmod(0o555)


def _fill(folder: Path) -> dict[str, int]:
    """A file of each kind, a database with a log, and shards: how many records each holds."""
    counts = {}
    for kind in SOUND:
        name = f"{kind.replace(' ', '_')}{sound(kind).suffix}"
        (folder / name).write_bytes(sound(kind).data)
        counts[name] = sound(kind).count
    (folder / "log.db").write_bytes(sound("ase db").data)
    _write_ahead(folder / "log.db")
    (folder / "shards").mkdir()
    for number in (0, 1):
        shard = folder / "shards" / f"data.{number}.lmdb"
        shard.write_bytes(sound("lmdb of arrays").data)
    return {**counts, "log.db": sound("ase db").count, "shards": 48}


def test_a_readonly_folder_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    _fill(tmp_path)
    counts = _fill(folder)
    _lock(folder)
    before = _state(folder)
    result = subprocess.run(
        [sys.executable, "-B", "-c", READ, tmp_path, folder], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = (line.split() for line in result.stdout.splitlines())
    assert {name: int(count) for name, count in lines} == counts
    assert _state(folder) == before


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    """No lock, journal or cache is put beside the data even where that would be possible."""
    counts = _fill(tmp_path)
    before = _state(tmp_path)
    for name, count in counts.items():
        assert len(list(open_dataset(tmp_path / name))) == count
    assert _state(tmp_path) == before


def test_cut_and_foreign_files() -> None:
    names = ["foreign empty", "foreign zeros", "foreign gzip", "foreign git-lfs pointer"]
    names += ["foreign web page", "cut"]
    outcomes = list(run(Case(kind, name, 0) for kind in SOUND for name in names))
    assert len(outcomes) == len(SOUND) * (1 + len(names))
    for outcome in outcomes:
        if outcome.case.mutation == "none":
            assert outcome.verdict == "records", outcome
        elif "lmdb" in outcome.case.kind or outcome.case.mutation != "cut":
            assert outcome.verdict == "ValueError", outcome
        else:
            assert outcome.verdict in ("records", "records + warning", "ValueError"), outcome
