"""Trajectories of ASE (`.traj`), checked before ASE reads them.

ASE believes what a file says of the sizes of its arrays, and of where they lie. The layout of its
`ulm` files, little-endian: 24 bytes of tag, version i64, count of frames i64, place of the table of
offsets i64; at each offset the length i64 of a JSON text, in which arrays stand as
``{"ndarray": [shape, dtype, place]}``. The table has room for 1, 42, 42², … offsets.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flt_mol.data.aselmdb.json_values import StoredJson, load

__all__ = ["check_trajectory"]

_HEAD = 48
_GROWTH = 42
_DEPTH = 16


def check_trajectory(path: Path) -> bool:
    """Refuse a trajectory whose frames are not whole.

    Returns:
        Whether the file ends where its last frame does: if not, a writer was stopped.

    Raises:
        ValueError: offsets, texts or arrays that do not lie inside the file, or arrays in a text
            that are not as long as they say.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if len(head) < _HEAD:
            raise ValueError("it is truncated")
        count, table = struct.unpack_from("<qq", head, 32)
        if not 0 <= count <= size // 8 or not _HEAD <= table <= size - 8 * count:
            raise ValueError(f"it is truncated: {count} frames are announced")
        file.seek(table)
        offsets = struct.unpack(f"<{count}q", file.read(8 * count))
        room = 1
        while room < count:
            room *= _GROWTH
        end = table + 8 * room
        for frame, offset in enumerate(offsets):
            try:
                end = max(end, _check_frame(file, offset, size))
            except (ValueError, struct.error) as error:
                raise ValueError(f"frame {frame} is damaged: {error}") from error
    return bool(size <= end)


def _check_frame(file: BinaryIO, offset: int, size: int) -> int:
    """Where the text of a frame ends."""
    if not 0 <= offset <= size - 8:
        raise ValueError("it is truncated")
    file.seek(offset)
    length = struct.unpack("<q", file.read(8))[0]
    end: int = offset + 8 + length
    if length < 0 or end > size:
        raise ValueError("it is truncated")
    content = load(file.read(length))
    if isinstance(content.get("constraints"), str):
        content["constraints"] = load(content["constraints"].encode())
    _check(content, size, _DEPTH)
    return end


def _check(value: Any, size: int, depth: int) -> None:
    if depth == 0:
        raise ValueError("values nested too deeply")
    if isinstance(value, StoredJson):
        if "__ase_objtype__" not in value.content:
            value.decode()
        value = value.content
    if isinstance(value, dict):
        if "ndarray" in value:
            shape, name, place = value["ndarray"]
            length = np.dtype(str(name)).itemsize
            if any(type(n) is not int or n < 0 for n in (*shape, place)):
                raise ValueError(f"an array of shape {shape}")
            for n in shape:
                length *= n
            if place + length > size:
                raise ValueError("it is truncated")
        for inner in value.values():
            _check(inner, size, depth - 1)
    elif isinstance(value, list) and not _flat(value):
        for inner in value:
            _check(inner, size, depth - 1)


def _flat(value: list[Any]) -> bool:
    return not any(isinstance(inner, dict | list | StoredJson) for inner in value)
