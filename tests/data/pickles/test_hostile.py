"""Files made to do harm: nothing of them runs, and reading them ends; and files in odd places."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing.cases import THINGS, Case
from fuzzing.hostile import JSON, PICKLES
from fuzzing.run import FAULT, run

WORKING = [
    "os.system",
    "posix.system",
    "eval",
    "exec",
    "subprocess",
    "getattr chain",
    "INST",
    "OBJ",
    "in a record",
    "as a key",
    "array of objects",
]


def _faults(cases: Iterator[Case]) -> list[str]:
    return [f"{o.case}: {o.reason}" for o in run(cases) if o.verdict == FAULT]


@pytest.mark.parametrize("name", WORKING)
def test_the_attacks_work_on_pickle(name: str, tmp_path: Path) -> None:
    attack = tmp_path / "attack.pkl"
    attack.write_bytes(PICKLES[name](str(tmp_path / "canary")))
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", code, attack], stderr=subprocess.DEVNULL, check=False)
    assert (tmp_path / "canary").exists()


def test_hostile_files() -> None:
    """Pickles and JSON as records and as files; pipes, links and devices in the place of files."""
    kinds = {"hostile pickle": PICKLES, "hostile json": JSON, "no regular file": THINGS}
    assert len(PICKLES) > 60
    seeds = {"hostile pickle": 1, "hostile json": 1, "no regular file": 2}
    assert not _faults(
        Case(kind, name, seed)
        for kind, names in kinds.items()
        for name in names
        for seed in range(seeds[kind])
    )
