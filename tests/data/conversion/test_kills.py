"""Killed at any moment, a conversion or a split is completed by running it again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from flt_mol.data.conversion import convert
from flt_mol.data.conversion.split import split

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*all tags.*:UserWarning"),
]

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def killed_at(moment: int, run) -> bool:
    """Runs it in a forked process that is killed before its n-th step on files; whether it was."""
    child = os.fork()
    if child == 0:
        steps = 0

        def hook(event: str, _: object) -> None:
            nonlocal steps
            steps += event in FILE_EVENTS
            if event in FILE_EVENTS and steps == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def at_every_moment(run, folder: Path, stride: int) -> int:
    """Kills a run that writes into `folder` at every `stride`-th step; the number of kills."""
    folder.mkdir()
    run()
    undisturbed = contents(folder)
    moment = 0
    while True:
        moment += stride
        shutil.rmtree(folder)
        folder.mkdir()
        killed = killed_at(moment, run)
        if not killed:
            assert contents(folder) == undisturbed
            return moment // stride - 1
        if contents(folder) == undisturbed:
            continue  # nothing was left to do
        before = contents(folder)
        try:
            run()
        except ValueError:  # killed after its last step, only the folder of the work is left
            assert {path: before.get(path) for path in undisturbed} == undisturbed
        assert contents(folder) == undisturbed, f"killed before step {moment}"


@pytest.mark.parametrize(("name", "stride"), [("a.lmdb", 1), ("a.aselmdb", 7), ("a.extxyz", 7)])
def test_killed_at_every_step(name, stride, source, tmp_path):
    given = source(3)

    def run() -> None:
        convert(given, tmp_path / "out" / name, workers=1, chunk_size=2)

    assert at_every_moment(run, tmp_path / "out", stride) > 5


def test_shards_killed_at_every_step(source, tmp_path):
    given = source(5)

    def run() -> None:
        convert(given, tmp_path / "out" / "shards", workers=1, chunk_size=3, shard_size=2)

    assert at_every_moment(run, tmp_path / "out", 5) > 10


def test_split_killed_at_every_step(source, tmp_path):
    given = source(5)

    def run() -> None:
        split(given, tmp_path / "out" / "data", {"train": 0.6, "val": 0.4}, workers=1)

    assert at_every_moment(run, tmp_path / "out", 9) > 10


def test_overwritten_or_as_before_when_killed(source, variety, bits, tmp_path):
    """The name holds the whole old file or the whole new one."""
    output = tmp_path / "a.lmdb"
    convert(source(3), output, workers=1)
    old = output.read_bytes()
    given = source(5)
    convert(given, tmp_path / "b.lmdb", workers=1, chunk_size=2)
    new = (tmp_path / "b.lmdb").read_bytes()

    def run() -> None:
        convert(given, output, workers=1, chunk_size=2, overwrite=True)

    for moment in range(1, 200, 4):
        output.write_bytes(old)
        killed = killed_at(moment, run)
        assert output.read_bytes() in (old, new)
        if not killed:
            break
        run()
        assert output.read_bytes() == new
    assert not killed
    assert sorted(os.listdir(tmp_path)) == ["a.lmdb", "b.lmdb", "source"]


PROGRAM = """
import sys
from flt_mol.data import open_dataset
from flt_mol.data.conversion import convert
if __name__ == "__main__":
    convert(open_dataset(sys.argv[1]), sys.argv[2], workers=2, chunk_size=1,
            progress=lambda done, total: print(done, flush=True))
"""


def test_workers_end_with_their_parent(source, tmp_path):
    given, output = source(200), tmp_path / "out.lmdb"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = [sys.executable, "-W", "ignore", str(program), str(given.path), str(output)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as parent:
        parent.stdout.readline()  # some are done
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        # the pipe is closed when the last worker that inherited it is gone
        begun = time.monotonic()
        parent.stdout.read()
        assert time.monotonic() - begun < 20
    assert list(tmp_path.glob(".out.lmdb.convert/chunk-*"))
    convert(given, output, workers=1, chunk_size=1)
    convert(given, tmp_path / "undisturbed.lmdb", workers=1)
    assert output.read_bytes() == (tmp_path / "undisturbed.lmdb").read_bytes()
