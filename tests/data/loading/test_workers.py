"""Loaders with processes of their own: how they start, fail and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from flt_mol.data import make_loader, open_dataset
from flt_mol.structures import Structures

# A second process on a busy machine, and torch's threads, are no news here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def epoch(loader: Any) -> list[Any]:
    return [(batch.sid, batch.pairs.index_j.tolist()) for batch in loader]


@pytest.fixture
def dataset(write_lmdb: Any, make_record: Any) -> Any:
    return open_dataset(write_lmdb({i: make_record(sid=100 + i) for i in range(11)}))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_batches_are_those_of_one_process(method: str, dataset: Any, tmp_path: Path) -> None:
    options: Any = {"max_atoms": 20, "shuffle": True, "cutoff": 3.0, "seed": 3}
    alone = make_loader(dataset, **options)
    assert dataset[3].sid == (103,)
    cached = make_loader(
        dataset,
        pair_cache=tmp_path,
        num_workers=1,
        multiprocessing_context=method,
        **options,
    )
    assert [epoch(cached), epoch(cached)] == [epoch(alone), epoch(alone)]
    assert cached.state_dict() == alone.state_dict()


def test_what_workers_read_ahead_does_not_count(dataset: Any) -> None:
    options: Any = {"shuffle": True, "cutoff": 3.0, "seed": 3}
    whole = make_loader(dataset, 2, **options)
    epochs = [epoch(whole), epoch(whole)]
    loader = make_loader(dataset, 2, num_workers=2, prefetch_factor=4, **options)
    for batch in loader:
        assert batch.sid == epochs[0][0][0]
        break
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 1)
    loader.load_state_dict(state)
    assert epoch(loader) == epochs[0][1:]
    assert epoch(loader) == epochs[1]


def test_an_error_arrives_as_it_was_raised(write_lmdb: Any, make_record: Any) -> None:
    records = {i: make_record(sid=i) for i in range(4)}
    records[2] = make_record(sid=77, pos=torch.full((6, 3), float("nan")))
    dataset = open_dataset(write_lmdb(records))
    with pytest.raises(ValueError, match=r"data.lmdb, key 2") as alone:
        list(make_loader(dataset, 2))
    with pytest.raises(ValueError, match=r"data.lmdb, key 2") as caught:
        list(make_loader(dataset, 2, num_workers=1))
    assert str(caught.value) == str(alone.value)
    assert "in a worker" in str(caught.value.__cause__)


RUN = """
    import os, sys, torch
    from flt_mol import Structures
    from flt_mol.data import make_loader
    systems = [Structures.single([6], [[0.0, 0.0, 0.0]], sid=i) for i in range(400)]
    loader = make_loader(systems, 1, num_workers=2)
    if __name__ == "__main__":
        import warnings
        warnings.simplefilter("ignore")
        for batch in loader:
            children = [p for p in os.listdir("/proc") if p.isdigit() and child(p)]
            print(*children, flush=True)
            {then}
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ["break", "interrupt"])
def test_no_process_is_left(end: str, tmp_path: Path) -> None:
    then = "break" if end == "break" else "import time; time.sleep(60)"
    script = textwrap.dedent(RUN).format(then=then)
    child = (
        "def child(p):\n"
        "    try: stat = open(f'/proc/{p}/stat').read()\n"
        "    except OSError: return False\n"
        "    return int(stat.rpartition(')')[2].split()[1]) == __import__('os').getpid()\n"
    )
    (tmp_path / "run.py").write_text(child + script)
    process = subprocess.Popen(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    workers = process.stdout.readline().split()
    assert len(workers) == 2
    if end == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors) == (end == "interrupt")
    assert not [pid for pid in workers if Path("/proc", pid).exists()]


def test_batches_that_are_kept_keep_no_file_open() -> None:
    systems = [Structures.single([6, 8], torch.zeros(2, 3), sid=i) for i in range(60)]
    before = len(os.listdir("/dev/fd"))
    kept = list(make_loader(systems, 1, num_workers=1, cutoff=2.0))
    assert len(kept) == 60
    assert len(os.listdir("/dev/fd")) < before + 30
