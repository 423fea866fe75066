"""Damaged files end in records or in a ValueError that names the file; and the judge can tell."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzzing import run as fuzzing_run
from fuzzing.cases import Case, choose, made, mutations
from fuzzing.reader import examine
from fuzzing.run import FAULT, Child, Outcome, judged, run, table
from fuzzing.sound import SOUND, sound

CASE = Case("lmdb of arrays", "cut", 1)


def _faults(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.case}: {o.reason}" for o in outcomes if o.verdict == FAULT]


def test_a_hundred_files() -> None:
    # And damage where LMDB keeps its keys, tree and transactions: it does not notice lost records.
    places = ("meta", "meta exchanged", "node", "node")
    kinds = [kind for kind in SOUND if "lmdb" in kind]
    trees = [Case(kind, name, i) for kind in kinds for i, name in enumerate(places)]
    outcomes = list(run([*choose(70, seed=3), *trees]))
    assert not _faults(outcomes)
    assert {outcome.case.kind for outcome in outcomes} >= set(SOUND)
    assert len(outcomes) == 70 + len(trees) + len(SOUND)
    assert {outcome.verdict for outcome in outcomes} >= {"records", "ValueError"}


def test_cases_are_made_again_the_same(tmp_path: Path) -> None:
    cases = [case for case in choose(60, seed=9) if case.kind not in ("ase db", "ase json")]
    made_files = []
    for attempt in ("a", "b"):
        for number, case in enumerate(cases):
            folder = tmp_path / attempt / str(number)
            folder.mkdir(parents=True)
            path, count = made(case, folder, tmp_path / "canary")
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            made_files.append((path.relative_to(tmp_path / attempt), count, content))
    assert made_files[: len(cases)] == made_files[len(cases) :]


@pytest.mark.parametrize("kind", ["lmdb of zlib", "extxyz"])
def test_every_mutation_changes_something(kind: str) -> None:
    given = sound(kind)
    changed = {
        name
        for name, mutate in mutations(kind).items()
        if any(mutate(given, random.Random(seed))[0] != given.data for seed in range(4))
    }
    assert changed == set(mutations(kind)) - {"none"}


def _answer(**changes: Any) -> dict[str, Any]:
    return {"count": 24, "read": 24, "errors": [], "warnings": [], "fault": None, **changes}


@pytest.mark.parametrize(
    ("answer", "verdict", "reason"),
    [
        ({}, "records", ""),
        ({"count": 23}, FAULT, "23 records of 24 without a word"),
        ({"count": 23, "warnings": ["usual"]}, FAULT, "23 records of 24"),
        ({"count": 23, "warnings": ["24 are announced"]}, "records + warning", ""),
        ({"errors": ["PATH, key 3: bad"]}, "ValueError", ""),
        ({"errors": ["PATH, key 3: bad", "bad"]}, FAULT, "does not name the file"),
        ({"errors": ["PATH: MemoryError"]}, FAULT, "memory"),
        ({"fault": "crash: SIGBUS"}, FAULT, "crash: SIGBUS"),
    ],
)
def test_verdicts(answer: Any, verdict: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "data.lmdb"
    errors = [error.replace("PATH", str(path)) for error in answer.get("errors", [])]
    outcome = judged(CASE, path, 24, _answer(**{**answer, "errors": errors}), {"usual"})
    assert outcome.verdict == verdict
    assert reason in outcome.reason


def test_the_table_counts() -> None:
    outcomes = [Outcome(CASE, "records"), Outcome(CASE, FAULT, "x"), Outcome(CASE, "ValueError")]
    assert "| lmdb of arrays | 3 | 1 | 0 | 1 | 1 |" in table(outcomes)
    assert "| all | 3 | 1 | 0 | 1 | 1 |" in table(outcomes)


def test_a_reader_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.lmdb"
    path.write_bytes(sound("lmdb of arrays").data)
    home = tmp_path / "home"
    home.mkdir()
    child = Child(home)
    try:
        assert child.examine(path)["count"] == 24
        monkeypatch.setattr(fuzzing_run, "SECONDS", 0.0)
        assert "hang" in child.examine(path)["fault"]
        assert not child.usable
        monkeypatch.undo()
    finally:
        child.close()


HARM = """
import os, pathlib, pickle, subprocess, sys
from fuzzing import reader
sys.addaudithook(reader._hook)
for harm in (
    "os.system('true')",
    "subprocess.run(['true'])",
    "open(os.devnull, 'w')",
    "os.mkdir('x')",
    "pickle.loads(pickle.dumps(pathlib.Path()))",
):
    reader._seen.clear()
    eval(harm)
    if not reader._seen:
        sys.exit(f"{harm} was not noted")
"""


def test_the_reader_notes_what_no_reader_does(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    subprocess.run([sys.executable, "-c", HARM], check=True, cwd=tmp_path, env=environment)


def test_an_error_of_another_type_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(path: str) -> Any:
        raise IndexError("deep inside")

    monkeypatch.setattr("flt_mol.data.open_dataset", opens)
    assert "IndexError: deep inside" in examine(str(tmp_path))["fault"]
