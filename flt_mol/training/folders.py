"""The folder of a run: new, or of the same run broken off; gone again if it came to nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flt_mol.data.folder_lock import locked_folder
from flt_mol.files import temporary_path
from flt_mol.outputs import check_folder
from flt_mol.training.resume import RESUME

__all__ = [
    "CONFIG",
    "LAST",
    "RunFolder",
    "check_run_folder",
    "finished_run",
    "run_folder",
    "run_yaml",
]

CONFIG = "config.yaml"
LAST = "last.ckpt"
_LOCK = "training"
_FREE = ("training.num_workers", "training.save_minutes")  # no weight depends on these


class RunFolder(NamedTuple):
    """Where a run goes, and the point that it goes on from, if it is one that was broken off."""

    path: Path
    resume: Path | None


def finished_run(output: str | None, settings: Mapping[str, Any]) -> Path | None:
    """The folder `output`, if it holds a finished run of the same settings.

    Processes that train together all find the same: a run ends only after all of them took part.
    """
    if output is None or not output.strip():
        return None
    folder = Path(output)
    if not (folder / LAST).is_file() or not (folder / CONFIG).is_file():
        return None
    return None if _changes(folder, settings) else folder


def check_run_folder(output: str | None, settings: Mapping[str, Any]) -> None:
    """Refuse an output folder that cannot be one, before any work is done.

    One that holds the same run, broken off or finished (:func:`finished_run`), can.

    Args:
        output: folder, or None for one under ``runs``.
        settings: plain data of the run.

    Raises:
        ValueError: it holds a run of other settings, is a file, or cannot be written.
    """
    if output is None:
        check_folder(Path("runs"), "output=FOLDER")
        return
    if not output.strip():
        raise ValueError("output is empty: give a folder, or null for runs/NAME")
    folder = Path(output)
    if (folder / CONFIG).exists():
        changed = _changes(folder, settings)
        if changed:
            finished = (folder / LAST).exists()
            kind = "a finished run" if finished else "a run that was broken off,"
            mend = "Choose" if finished else "Give the same ones to go on with it, choose"
            raise ValueError(
                f"{folder} holds {kind} with other settings: {'; '.join(changed)}. {mend} another "
                "output folder, or remove it"
            )
    check_folder(folder, "output=FOLDER")


@contextmanager
def run_folder(output: str | None, name: str, settings: Mapping[str, Any]) -> Iterator[RunFolder]:
    """`output`, or one of runs/NAME, runs/NAME-2, …, with the settings written to it, locked.

    It is the first that holds a run of the same settings which was broken off and which nobody goes
    on with just now, or else the first free one. On any exception without weights or a point to go
    on from, all that was put there is removed again; else the exception gets a note that says so.

    Args:
        output: folder, or None for one under ``runs``.
        name: of the run.
        settings: plain data of the run.

    Raises:
        ValueError: another process is training into `output`, or has just finished there.
    """
    with ExitStack() as lock:
        folder, made = _make(output, name, settings, lock)
        before = set(folder.iterdir())
        if not (folder / CONFIG).exists():
            _write(settings, folder / CONFIG)
        resume = folder / RESUME
        try:
            yield RunFolder(folder, resume if resume.exists() else None)
        except BaseException as error:
            _note(error, folder)
            if not any((folder / kept).exists() for kept in ("best.ckpt", RESUME)):
                _remove(set(folder.iterdir()) - before)
                if made:
                    lock.close()
                    folder.rmdir()
            raise


def _note(error: BaseException, folder: Path) -> None:
    if (folder / "best.ckpt").exists():
        error.add_note(f"the best weights so far: {folder / 'best.ckpt'}")
    if (folder / RESUME).exists() and isinstance(error, KeyboardInterrupt | SystemExit):
        error.add_note(f"to go on in {folder}, give the same command again")


def _make(
    output: str | None, name: str, settings: Mapping[str, Any], lock: ExitStack
) -> tuple[Path, bool]:
    """The folder, held, and whether it is new."""
    if output is not None:
        folder = Path(output)
        new = not folder.exists()
        lock.enter_context(locked_folder(folder, _LOCK))
        if (folder / LAST).exists():  # since this process looked first
            raise ValueError(f"another process has just finished the run in {folder}")
        return folder, new
    Path("runs").mkdir(exist_ok=True)
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        number += 1
        try:
            folder.mkdir()
            new = True
        except FileExistsError:
            if not _is_broken_off(folder, settings):
                continue
            new = False
        try:
            lock.enter_context(locked_folder(folder, _LOCK))
        except ValueError:  # somebody goes on with it
            continue
        if new or _is_broken_off(folder, settings):
            return folder, new
        lock.close()


def _is_broken_off(folder: Path, settings: Mapping[str, Any]) -> bool:
    if not (folder / CONFIG).is_file() or (folder / LAST).exists():
        return False
    return not _changes(folder, settings)


def _changes(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """What is set otherwise in a folder's run, as KEY=THERE, here HERE."""
    try:
        content = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"its {CONFIG} cannot be read ({type(error).__name__})"]
    there = _flat(content if isinstance(content, dict) else {})
    here = _flat(yaml.safe_load(run_yaml(settings)))
    keys = sorted({*there, *here} - {*_FREE})
    missing = object()
    return [
        f"{key}={_shown(there, key)}, here {_shown(here, key)}"
        for key in keys
        if there.get(key, missing) != here.get(key, missing)
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "not given"


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and value:
            out |= _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "defaults":
            out[f"{prefix}{key}"] = value
    return out


def run_yaml(settings: Mapping[str, Any]) -> str:
    """Settings as a yaml file that `flt-mol train` takes."""
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


def _write(settings: Mapping[str, Any], path: Path) -> None:
    with temporary_path(path) as temporary:
        temporary.write_text(run_yaml(settings), encoding="utf-8")


def _remove(paths: set[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
