"""Several processes: what they say when one of them dies, or when a record is bad."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert
from flt_mol.data.conversion.pool import available_cores

pytestmark = pytest.mark.filterwarnings("ignore:.*all tags.*:UserWarning")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_dead_worker_is_an_error_that_says_so(make_record, tmp_path):
    def kill_one(done, total):
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    given = open_dataset([make_record(sid=i) for i in range(200)])
    message = r"ended without a word.*memory.*kept in .*\.convert"
    with pytest.raises(ChildProcessError, match=message):
        convert(given, tmp_path / "out.lmdb", workers=2, chunk_size=2, progress=kill_one)
    assert not (tmp_path / "out.lmdb").exists()


def test_cores_are_those_of_this_process():
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
