"""The folder of a run: new, or of the same run interrupted; removed if it wrote no weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from flt_mol.files import temporary_path
from flt_mol.training.callbacks import BEST, LAST
from flt_mol.training.processes import FOLDER, World
from flt_mol.training.resume import RESUME

_CONFIG = "config.yaml"
_LOCK = ".training.lock"
_WAIT = 6.0  # s; workers of a killed run end within 5
_FREE = {"training.num_workers", "training.save_minutes"}  # weights do not depend on these


@contextmanager
def run_folder(
    output: str | None, name: str, settings: Mapping[str, Any], world: World
) -> Iterator[Path]:
    """`output`, or one of runs/NAME, runs/NAME-2, …, with the settings written to it, locked.

    Of these it is the first that is free, or holds an interrupted run of the same settings which no
    process is resuming. On an exception without weights or a point to resume from, what was put
    there is removed; else the exception gets a note that names them. Other processes of the run get
    the folder of the first one.

    Raises:
        ValueError: `output` cannot be written, holds a run of other settings, or another process is
            training into it.
    """
    if not world.is_first:
        given = os.environ.get(FOLDER) or output
        if given is None:
            raise ValueError("torchrun needs output=FOLDER, the same for all processes")
        yield Path(given)
        return
    with ExitStack() as stack:
        folder, new = _hold(output, name, settings, stack)
        if (folder / LAST).exists():
            yield folder
            return
        before = set(folder.iterdir())
        try:
            if not (folder / _CONFIG).exists():
                with temporary_path(folder / _CONFIG) as temporary:
                    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
                    temporary.write_text(text, encoding="utf-8")
            stack.enter_context(_shown(folder, world))
            yield folder
        except BaseException as error:
            best, resume = folder / BEST, folder / RESUME
            if best.exists():
                error.add_note(f"the best weights so far: {best}")
            if resume.exists() and isinstance(error, KeyboardInterrupt | SystemExit):
                error.add_note(f"to resume in {folder}, give the same command again")
            if not best.exists() and not resume.exists():
                stack.close()
                for path in set(folder.iterdir()) - before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                if new:
                    folder.rmdir()
            raise


def written_files(folder: Path) -> tuple[Path, ...]:
    """All files of a run: the folder may hold older ones."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    start = (folder / _CONFIG).stat().st_mtime
    return tuple(sorted(path for path in found if path.stat().st_mtime >= start))


def _hold(
    output: str | None, name: str, settings: Mapping[str, Any], stack: ExitStack
) -> tuple[Path, bool]:
    """The folder, locked, and whether it is new."""
    if output is not None:
        folder = Path(output)
        new = not folder.exists()
        used = any((folder / name).exists() for name in (_CONFIG, LAST, BEST, RESUME))
        if used and (changed := "; ".join(_changes(folder, settings))):
            hint = "choose another output, or remove it"
            raise ValueError(f"{folder} holds a run with other settings: {changed}; {hint}")
        if not _lock(folder, stack):
            raise ValueError(f"another process is training into {folder}")
        return folder, new
    for number in count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        new = not folder.exists()
        if not new and ((folder / LAST).exists() or _changes(folder, settings)):
            continue
        if _lock(folder, stack) and not (folder / LAST).exists():  # another may just have finished
            break
        stack.close()
    return folder, new


def _lock(folder: Path, stack: ExitStack) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(FileLock(folder / _LOCK, timeout=_WAIT))
    except Timeout:
        return False
    except OSError as error:
        raise ValueError(f"output {folder} cannot be written: {error.strerror or error}") from error
    stack.callback((folder / _LOCK).unlink, missing_ok=True)
    return True


@contextmanager
def _shown(folder: Path, world: World) -> Iterator[None]:
    """Processes that Lightning starts meanwhile find the folder of the run in their environment."""
    before = dict(os.environ)
    if not world.torchrun:  # of an earlier launcher
        for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    os.environ[FOLDER] = str(folder.absolute())
    try:
        yield
    finally:  # of what Lightning added, too
        os.environ.clear()
        os.environ.update(before)


def _changes(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    try:
        content = yaml.safe_load((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"its {_CONFIG} cannot be read ({type(error).__name__})"]
    known = content if isinstance(content, dict) else {}
    stated = (known.get("data") or {}).get("tag_rule")  # older runs do not state it
    return differences(known, settings, _FREE if stated else {*_FREE, "data.tag_rule"})


def differences(there: Mapping[str, Any], here: Mapping[str, Any], ignored: set[str]) -> list[str]:
    """What two trees of settings differ in."""
    trees, lacking = (_flattened(there), _flattened(here)), "not given"
    keys = sorted(set().union(*trees) - ignored)
    both = {key: [tree.get(key, lacking) for tree in trees] for key in keys}
    return [f"{key}={old}, here {new}" for key, (old, new) in both.items() if old != new]


def _flattened(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        nested = isinstance(value, Mapping) and value
        out |= _flattened(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return out
