"""The folder of a run: new, or of the same run interrupted; removed if nothing came of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

from flt_mol.files import temporary_path
from flt_mol.training.callbacks import BEST, LAST
from flt_mol.training.resume import RESUME

__all__ = [
    "RunFolder",
    "check_output",
    "differences",
    "finished_run",
    "run_folder",
    "written_files",
]

_CONFIG = "config.yaml"
_LOCK = ".training.lock"
_WAIT = 6.0  # s; workers of a killed run end within 5
_FREE = {"training.num_workers", "training.save_minutes"}  # weights do not depend on these


class RunFolder(NamedTuple):
    """Where a run goes, and the point that it resumes from, if it was interrupted."""

    path: Path
    resume: Path | None


def finished_run(output: str | None, settings: Mapping[str, Any]) -> Path | None:
    """The folder `output`, if it holds a finished run of the same settings."""
    if output is None or not (Path(output) / LAST).is_file():
        return None
    return None if _changes(Path(output), settings) else Path(output)


def check_output(output: str | None, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that holds a run of other settings, or cannot be written, before any work."""
    folder = Path("runs" if output is None else output)
    changed = _changes(folder, settings) if (folder / _CONFIG).exists() else []
    if changed and output is not None:
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(changed)}; choose another "
            "output, or remove it"
        )
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"output {folder} cannot be written: {error.strerror or error}") from error


@contextmanager
def run_folder(output: str | None, name: str, settings: Mapping[str, Any]) -> Iterator[RunFolder]:
    """`output`, or one of runs/NAME, runs/NAME-2, …, with the settings written to it, locked.

    Of these it is the first that is free, or holds an interrupted run of the same settings which no
    process is resuming. On an exception without weights or a point to resume from what was put
    there is removed; else the exception gets a note that names them.
    """
    with ExitStack() as stack:
        folder, new = _hold(output, name, settings, stack)
        before = set(folder.iterdir())
        if not (folder / _CONFIG).exists():
            with temporary_path(folder / _CONFIG) as temporary:
                text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
                temporary.write_text(text, encoding="utf-8")
        best, resume = folder / BEST, folder / RESUME
        try:
            yield RunFolder(folder, resume if resume.exists() else None)
        except BaseException as error:
            if best.exists():
                error.add_note(f"the best weights so far: {best}")
            if resume.exists() and isinstance(error, KeyboardInterrupt | SystemExit):
                error.add_note(f"to resume in {folder}, give the same command again")
            if not best.exists() and not resume.exists():
                _remove(set(folder.iterdir()) - before)
                if new:
                    stack.close()
                    shutil.rmtree(folder)
            raise


def written_files(folder: Path) -> tuple[Path, ...]:
    """All files of a run."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return tuple(sorted(found))


def _hold(
    output: str | None, name: str, settings: Mapping[str, Any], stack: ExitStack
) -> tuple[Path, bool]:
    """The folder, locked, and whether it is new."""
    if output is not None:
        folder = Path(output)
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder, stack, _WAIT)
        if (folder / LAST).exists():  # since this process looked first
            raise ValueError(f"another process has just finished the run in {folder}")
        return folder, new
    for number in count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        new = not folder.exists()
        if not new and not _is_interrupted(folder, settings):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _lock(folder, stack, 0 if new else _WAIT)
        except ValueError:
            continue
        if new or _is_interrupted(folder, settings):
            break
        stack.close()
    return folder, new


def _lock(folder: Path, stack: ExitStack, seconds: float) -> None:
    try:
        stack.enter_context(FileLock(folder / _LOCK, timeout=seconds))
    except Timeout:
        raise ValueError(f"another process is training into {folder}") from None
    stack.callback((folder / _LOCK).unlink, missing_ok=True)


def _is_interrupted(folder: Path, settings: Mapping[str, Any]) -> bool:
    return not (folder / LAST).exists() and not _changes(folder, settings)


def _changes(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    try:
        content = yaml.safe_load((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"its {_CONFIG} cannot be read ({type(error).__name__})"]
    return differences(content if isinstance(content, dict) else {}, settings, _FREE)


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], ignored: Collection[str] = ()
) -> list[str]:
    """What two trees of settings differ in."""
    old, new = _flattened(there), _flattened(here)
    return [
        f"{key}={old.get(key, 'not given')}, here {new.get(key, 'not given')}"
        for key in sorted((old.keys() | new.keys()) - set(ignored))
        if key not in old or key not in new or old[key] != new[key]
    ]


def _flattened(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        nested = isinstance(value, Mapping) and value
        out |= _flattened(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return out


def _remove(paths: set[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
