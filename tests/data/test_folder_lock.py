"""One writer in a folder at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from flt_mol.data import folder_lock
from flt_mol.data.folder_lock import locked_folder

fcntl = pytest.importorskip("fcntl")


def test_the_second_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with locked_folder(folder, "download"):
        with (
            pytest.raises(ValueError, match=r"another download into .*folder is running; wait"),
            locked_folder(folder, "download"),
        ):
            raise AssertionError("two at once")
        with locked_folder(folder, "convert"):
            assert len(os.listdir(folder)) == 2
    assert os.listdir(folder) == []
    with locked_folder(folder, "download"):
        pass


def _hold(folder: Path, ready: Any) -> None:
    with locked_folder(folder, "download"):
        ready.set()
        signal.pause()


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(20)
    with pytest.raises(ValueError, match="another download"), locked_folder(tmp_path, "download"):
        pass
    holder.kill()
    holder.join()
    assert os.listdir(tmp_path) == [".download.lock"]
    with locked_folder(tmp_path, "download"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_lock_file_that_was_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def slow(file: Any, how: int) -> None:
        if not calls:  # the holder before removes it between our open and our lock
            (tmp_path / ".download.lock").unlink()
        calls.append(how)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with locked_folder(tmp_path, "download"):
        monkeypatch.undo()
        with pytest.raises(ValueError, match="another"), locked_folder(tmp_path, "download"):
            pass
    assert len(calls) == 2


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked_folder(tmp_path, "download"):
        pass
    monkeypatch.setattr(folder_lock, "fcntl", None)
    with locked_folder(tmp_path, "download"):
        pass
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message), locked_folder(folder, "download"):
            pass

    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    refused(tmp_path / "file", r"cannot make the folder .*/file: a file has that name")
    refused(tmp_path / "link", r"cannot make the folder .*/link: a link to nothing has that name")
    refused(tmp_path / "file" / "x", r"cannot make the folder .*file/x: Not a directory")
    (tmp_path / "taken" / ".download.lock").mkdir(parents=True)
    refused(tmp_path / "taken", r"cannot write .*taken/\.download\.lock: Is a directory")


def _work(begun: Any) -> None:
    begun.set()
    time.sleep(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A killed run leaves its workers for some seconds."""
    with locked_folder(tmp_path, "training"):
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        worker = context.Process(target=_work, args=(begun,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, beside which torch forks
            worker.start()
        assert begun.wait(20)
        (held,) = folder_lock._HELD
        held.close()  # as a kill does
        try:
            with locked_folder(tmp_path, "training"):
                assert worker.is_alive()
        finally:
            worker.kill()
            worker.join()
