"""Several processes: what they say when one of them dies, or when a record is bad."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert
from flt_mol.data.conversion.pool import _interrupts_held, available_cores

pytestmark = pytest.mark.filterwarnings("ignore:.*all tags.*:UserWarning")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_dead_worker_is_an_error_that_says_so(make_record, tmp_path):
    def kill_one(done, total):
        with suppress(ProcessLookupError):  # killed before, and not noticed yet
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    given = open_dataset([make_record(sid=i) for i in range(200)])
    message = r"ended without a word.*memory.*kept in .*\.convert"
    with pytest.raises(ChildProcessError, match=message):
        convert(given, tmp_path / "out.lmdb", workers=2, chunk_size=2, progress=kill_one)
    assert not (tmp_path / "out.lmdb").exists()


def test_cores_are_those_of_this_process():
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_workers_leave_interrupts_to_their_parent_from_the_start(source, tmp_path):
    """Blocked when they are started, before they could do anything about it."""
    blocked = []

    def look(done, total):
        for child in multiprocessing.active_children():
            status = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            mask = next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
            blocked.append(bool(mask >> (signal.SIGINT - 1) & 1))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT)
    convert(source(20), tmp_path / "out.lmdb", workers=2, chunk_size=5, progress=look)
    assert len(blocked) >= 2
    assert all(blocked)
    assert before == (signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT))


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signal masks")
def test_an_interrupt_that_was_held_comes_through():
    came = []

    def interrupt():
        with _interrupts_held():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            came.append("late")

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert came == ["late"]
