import json
import shlex
import sys

import pytest
import torch

from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.speed import records as module
from flt_mol.analysis.speed.points import (
    ALLOCATORS,
    EXPLAINED,
    Setting,
    huge_pages,
    out_of_memory,
    run_point,
)
from flt_mol.analysis.speed.records import latest, measured

CRYSTAL = "flt_mol.analysis.speed.slabs:crystal"
LIMITED = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")


def test_a_point_runs_under_its_setting(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    target = "flt_mol.analysis.speed.points:describe_machine"
    answer = run_point(target, {}, Setting(threads=1, allocator="keep", limit_gb=4))
    assert answer["result"] == answer["machine"]
    assert answer["machine"]["torch"] == torch.__version__
    # Settings of allocators are those of the name, and nothing that lay about.
    environment = answer["environment"]
    shown = {name: value for name, value in environment.items() if name.startswith("MALLOC_")}
    assert shown == ALLOCATORS["keep"]
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("allocator", list(ALLOCATORS))
def test_no_allocator_is_inherited(monkeypatch, allocator):
    for name in ("GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "glibc.malloc.check=0")
    # What the process itself saw, not only what was shown.
    said = "import json, os; print(json.dumps(dict(os.environ)))"
    arguments = {"cmd": shlex.join([sys.executable, "-c", said])}
    answer = run_point("subprocess:getoutput", arguments, Setting(allocator=allocator, limit_gb=4))
    names = ("GLIBC_", "THP_", "MALLOC_")
    saw = json.loads(answer["result"])
    seen = {key: value for key, value in saw.items() if key.startswith(names)}
    assert seen == ALLOCATORS[allocator]
    shown = {key: value for key, value in answer["environment"].items() if key.startswith(names)}
    assert shown == ALLOCATORS[allocator]


def test_allocators_are_explained():
    assert list(EXPLAINED) == list(ALLOCATORS)
    assert huge_pages() in ("always", "madvise", "never", None)


@LIMITED
def test_a_point_that_needs_too_much_is_stopped():
    answer = run_point(CRYSTAL, {"num_atoms": 10**8}, Setting(limit_gb=0.5))
    assert answer["stopped"] == "needs more than 0.5 GB"
    assert "result" not in answer


def test_other_failures_are_errors():
    with pytest.raises(RuntimeError, match="num_atoms is 0, expected 1 at least"):
        run_point(CRYSTAL, {"num_atoms": 0}, Setting(limit_gb=None))
    with pytest.raises(ValueError, match="expected one of default, keep, huge"):
        run_point(CRYSTAL, {"num_atoms": 4}, Setting(allocator="jemalloc"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("allocate memory"), False),
    ],
)
def test_how_a_lack_of_memory_shows(error, expected):
    assert out_of_memory(error) is expected


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def run(target, arguments, setting):
        calls.append((arguments["atoms"], setting.threads))
        if arguments["atoms"] > 20:
            return {"stopped": "needs more than 1 GB", "environment": {}}
        return {"result": {"n": len(calls)}, "machine": {}, "environment": {}}

    monkeypatch.setattr(module, "run_point", run)
    return calls


def points(*atoms):
    return [{"what": "model", "atoms": n} for n in atoms]


def test_each_point_is_a_line_and_the_last_one_counts(calls, tmp_path):
    results = Results(tmp_path / "lines.jsonl")
    settings = [Setting(1), Setting(2)]
    assert len(list(measured("one_system", points(10, 20), settings, results))) == 4
    again = list(measured("one_system", points(10), settings[:1], results))
    assert again[0].result == {"n": 5}
    found = latest(results, "one_system")
    assert [(r.point["atoms"], r.setting.threads) for r in found] == [
        (10, 1), (20, 1), (10, 2), (20, 2),
    ]  # fmt: skip
    assert found[0].result == {"n": 5}
    assert latest(results, "lengths") == []
    list(measured("one_system", [{**points(10)[0], "rounds": 9}], settings[:1], results))
    found = latest(results, "one_system")
    assert len(found) == 4
    assert found[0].result == {"n": 6}


def test_missing_points_alone(calls, tmp_path):
    results = Results(tmp_path / "lines.jsonl")
    list(measured("one_system", points(10), [Setting()], results))
    list(measured("one_system", points(10, 20), [Setting()], results, missing=True))
    assert calls == [(10, 1), (20, 1)]


def test_larger_ones_than_one_that_was_stopped_are_not_tried(calls, tmp_path):
    results = Results(tmp_path / "lines.jsonl")
    order = [*points(10, 30, 40), {"what": "attention", "atoms": 15}]
    found = list(measured("one_system", order, [Setting()], results, size="atoms"))
    assert calls == [(10, 1), (30, 1), (15, 1)]
    assert [record.stopped for record in found] == [
        None, "needs more than 1 GB", "not tried: a smaller one was stopped", None,
    ]  # fmt: skip
