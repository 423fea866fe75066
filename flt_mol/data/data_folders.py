"""Folders for large data: ``$FLT_MOL_DATA``, then one in the user's cache; what is wrong with them.

The default is ``~/.cache/flt_mol/data``, or ``$XDG_CACHE_HOME/flt_mol/data`` where that is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["absolute", "candidates_in", "data_folder", "data_folders", "places", "troubles"]

_VARIABLE = "FLT_MOL_DATA"
_TELLING = 3  # parts at the end of a path that say which data set it is: all/val_id/data.lmdb


def data_folder() -> Path:
    """Where large data sets are put: ``$FLT_MOL_DATA``, else a folder of the user's cache.

    Raises:
        ValueError: no ``$FLT_MOL_DATA`` and no home, or one that begins with the `~` of nobody.
    """
    if own := os.environ.get(_VARIABLE):
        return absolute(own, _VARIABLE)
    folders = data_folders()
    if not folders:
        raise ValueError(f"there is no home folder to put data in: set {_VARIABLE} to a folder")
    return folders[0]


def data_folders() -> list[Path]:
    """All folders in which data sets are looked for, the first first; they need not exist."""
    folders = []
    if own := os.environ.get(_VARIABLE):
        with suppress(ValueError):  # `troubles` tells
            folders.append(absolute(own, _VARIABLE))
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):  # no home
        home = cache if cache.is_absolute() else Path("~/.cache").expanduser()
        folders.append(home / "flt_mol" / "data")
    return folders


def absolute(folder: str | Path, name: str) -> Path:
    """A folder from the working directory, `~` being the user's home.

    Args:
        folder: as given.
        name: of the option or variable that gave it, for the message.

    Raises:
        ValueError: `~` of a user that there is not.
    """
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{name} is {folder}, and there is no such home folder") from error


def places(beside: Path, name: str, relative: Path) -> dict[Path, bool]:
    """Folders in which a file of a data set is looked for, the first first.

    Args:
        beside: folder of its recipe.
        name: of the data set.
        relative: path of the file, as its recipe gives it.

    Returns:
        Folder → whether it is the data set's own.
    """
    found = {beside: True}
    for data in data_folders():
        for own in _folder_names(name):
            found.setdefault(data / own, True)
        # Directly in a folder for all data sets only what cannot be of another one.
        if len(relative.parts) >= _TELLING:
            found.setdefault(data, False)
    return found


def candidates_in(folders: Mapping[Path, bool], split: str, relative: Path) -> Iterator[Path]:
    """Where a split's file may lie in folders as of :func:`places`, the best first.

    In a data set's own folder, a compact version comes first; then the file under its path, then
    under ends of it, as of archives that were unpacked or moved otherwise.
    """
    parts = relative.parts
    for folder, own in folders.items():
        if own:
            yield folder / "compact" / f"{split}.lmdb"
        for cut in range(max(len(parts) - _TELLING, 0) + 1):
            yield folder.joinpath(*parts[cut:])


def troubles(name: str) -> list[str]:
    """What is in the way of finding data: one sentence for each place that is not as it was meant.

    Args:
        name: of the data set.
    """
    found = []
    if own := os.environ.get(_VARIABLE):
        try:
            folder = absolute(own, _VARIABLE)
        except ValueError as error:
            found.append(str(error))
        else:
            shown = own if own == str(folder) else f"{own}, that is {folder}"
            if why := _trouble(folder):
                found.append(f"{_VARIABLE} is {shown}, which {why}")
    inside = (data / one for data in data_folders() for one in _folder_names(name))
    # A data set need not have a folder there, but what is called like one is to be one.
    found += [
        f"{path} {why}" for path in inside if os.path.lexists(path) and (why := _trouble(path))
    ]
    return found


def _folder_names(name: str) -> list[str]:
    return list(dict.fromkeys((name, name.replace("_", "-"))))


def _trouble(folder: Path) -> str:
    """Why nothing can be found there; empty for a folder in order."""
    try:
        with os.scandir(folder):
            return ""
    except FileNotFoundError:
        if folder.is_symlink():
            return f"is a link to {os.readlink(folder)}, which does not exist"
        return "does not exist"
    except NotADirectoryError:
        return "is no folder" if os.path.lexists(folder) else "lies below a file, not a folder"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
