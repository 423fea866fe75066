"""The folder of a run: never one in use, and gone again when the run came to nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flt_mol.outputs import check_folder


def check_run_folder(output: str | None) -> None:
    """Refuse an output folder that cannot be one, before any work is done.

    Raises:
        ValueError: it holds a run already, is a file, or cannot be written.
    """
    if output is None:
        check_folder(Path("runs"), "output=FOLDER")
        return
    if not output.strip():
        raise ValueError("output is empty: give a folder, or null for runs/NAME")
    folder = Path(output)
    if (folder / "config.yaml").exists():
        weights = "" if (folder / "best.ckpt").exists() else ", broken off without weights"
        raise ValueError(
            f"{folder} holds a run already{weights}; choose another output folder, or remove it"
        )
    check_folder(folder, "output=FOLDER")


@contextmanager
def run_folder(output: str | None, name: str) -> Iterator[Path]:
    """`output`, or the first free of runs/NAME, runs/NAME-2, …, made.

    On any exception without a ``best.ckpt`` all that was put there is removed again, and else the
    exception gets a note that names it.
    """
    folder, made = _make(output, name)
    before = set(folder.iterdir())
    try:
        yield folder
    except BaseException as error:
        best = folder / "best.ckpt"
        if best.exists():
            error.add_note(f"the best weights so far: {best}")
        else:
            _remove(set(folder.iterdir()) - before)
            if made:
                folder.rmdir()
        raise


def _make(output: str | None, name: str) -> tuple[Path, bool]:
    """The folder, and whether it is new."""
    if output is not None:
        folder = Path(output)
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        return folder, new
    Path("runs").mkdir(exist_ok=True)
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder, True


def _remove(paths: set[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
