"""What kind of file a data set is read from, and how large it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from flt_mol.data.lmdb.file import Environment

__all__ = ["disk_bytes", "kind_of", "kind_of_pickle"]

_NAMES = {
    "AseLmdbDataset": "LMDB of ASE rows (aselmdb)",
    "MemoryDataset": "in memory",
}


def kind_of(dataset: Any) -> str:
    """E.g. ``LMDB of PyG 1.x pickles``; of several files, how many of which kind.

    A data set tells by its attribute `kind`, else it is found out here.
    """
    parts = getattr(dataset, "parts", None)
    if parts:
        kinds = Counter(kind_of(part) for part in parts)
        return ", ".join(f"{n} × {kind}" for kind, n in kinds.items())
    kind = getattr(dataset, "kind", None)
    if isinstance(kind, str):
        return kind
    name = type(dataset).__name__
    if name == "LmdbDataset":
        return f"LMDB of {_kind_of_values(dataset.file)}"
    if name == "AseDataset":
        return f"ASE {_ase_format(dataset.path)}"
    return _NAMES.get(name, name)


def _ase_format(path: Path) -> str:
    from ase.io.formats import UnknownFileTypeError, filetype

    try:
        return str(filetype(str(path)))
    except (OSError, UnknownFileTypeError):
        return path.suffix


def _kind_of_values(file: Path) -> str:
    environment = Environment.of(file)
    key = next(filter(bytes.isdigit, environment.keys()), b"")
    return kind_of_pickle(environment.get(key) or b"")


def kind_of_pickle(data: bytes) -> str:
    r"""What a pickled record was made by, going by the names that it holds.

    Args:
        data: the record as stored.

    Example:
        >>> kind_of_pickle(b"\x80\x04torch_geometric.data.data")
        'PyG 1.x pickles'
    """
    if data[:1] == b"x":
        return "zlib-compressed pickles"
    if b"torch_geometric" in data:
        return f"PyG {'2' if b'GlobalStorage' in data else '1'}.x pickles"
    if b"_rebuild_tensor" in data:
        return "pickles with torch tensors"
    return "pickles with numpy arrays" if b"numpy" in data else "pickles"


def disk_bytes(dataset: Any) -> int | None:
    """Bytes of the files of a data set, None where it is in memory or they are gone."""
    total = 0
    for part in getattr(dataset, "parts", None) or [dataset]:
        path = getattr(part, "file", None) or getattr(part, "path", None)
        try:
            total += Path(path).stat().st_size  # type: ignore[arg-type]
        except (OSError, TypeError):
            return None
    return total
