"""Flat files: a whole split as one safetensors file, memory-mapped, of which a batch is a slice.

Systems lie one after the other, as in :class:`flt_mol.structures.Structures`: B systems, N atoms in
all, and one tensor for each field.

======================  =======  =========  ==================================================
tensor                  type     shape
======================  =======  =========  ==================================================
``ptr``                 int64    (B + 1,)   first atom of each system, and N at the end
``atomic_numbers``      uint8    (N,)       1 to 118
``tags``                uint8    (N,)       0 below the surface, 1 surface, 2 adsorbate
``fixed``               bool     (N,)       held fixed in the relaxation
``positions``           float32  (N, 3)     Å, initial structure
``cell``                float32  (B, 3, 3)  Å, rows are the lattice vectors
``pbc``                 bool     (B, 3)
``sid``                 int64    (B,)       or JSON texts, where one name is not a whole number
``energy``              float64  (B,)       eV, the target; optional, NaN where there is none
``energy_initial``      float64  (B,)       eV, before relaxation; likewise
``positions_relaxed``   float32  (N, 3)     Å; likewise
``force``               float32  (N, 3)     eV/Å, of the initial structure; on request
``info``                uint8    (bytes,)   further plain values, a JSON object a system; optional
======================  =======  =========  ==================================================

JSON texts, of ``info`` and of ``sid`` if need be, are UTF-8, one after the other; ``info_ptr`` and
``sid_ptr`` (int64, (B + 1,)) hold where each begins. The metadata has ``format = flt_mol.flat`` and
``version = 1``. Any reader of safetensors opens such a file.
"""

from __future__ import annotations

import json
import math
import operator
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.schema import ReadOptions, Record
from flt_mol.files import readable, temporary_path
from flt_mol.structures import Structures

__all__ = ["FlatDataset", "FlatWriter", "write_flat"]

_FORMAT, _VERSION = "flt_mol.flat", "1"
_TYPES = {"I64": "<i8", "F64": "<f8", "F32": "<f4", "U8": "u1", "BOOL": "?"}
_SYSTEM, _ATOM, _FENCE, _BYTE = "system", "atom", "fence", "byte"
# Name → type, what its rows are, shape of a row. Wide types first: each is aligned in the file.
_TENSORS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "ptr": ("I64", _FENCE, ()),
    "sid": ("I64", _SYSTEM, ()),
    "sid_ptr": ("I64", _FENCE, ()),
    "info_ptr": ("I64", _FENCE, ()),
    "energy": ("F64", _SYSTEM, ()),
    "energy_initial": ("F64", _SYSTEM, ()),
    "cell": ("F32", _SYSTEM, (3, 3)),
    "positions": ("F32", _ATOM, (3,)),
    "positions_relaxed": ("F32", _ATOM, (3,)),
    "force": ("F32", _ATOM, (3,)),
    "atomic_numbers": ("U8", _ATOM, ()),
    "tags": ("U8", _ATOM, ()),
    "fixed": ("BOOL", _ATOM, ()),
    "pbc": ("BOOL", _SYSTEM, (3,)),
    "sid_text": ("U8", _BYTE, ()),
    "info": ("U8", _BYTE, ()),
}
_PER_ATOM = frozenset(name for name, (_, rows, _) in _TENSORS.items() if rows == _ATOM)
_REQUIRED = ("ptr", "atomic_numbers", "tags", "fixed", "positions", "cell", "pbc")
_OPTIONAL = ("energy", "energy_initial", "positions_relaxed", "force")
_DEFAULTS = ("y_relaxed", "y_init", "pos_relaxed")
_OC20 = {"positions": "pos", "energy": "y_relaxed", "energy_initial": "y_init"}
_OC20 |= {"positions_relaxed": "pos_relaxed"}
_MEMORY = {"atomic_numbers": np.int64, "tags": np.int64}  # types of Structures
_ELEMENTS, _TAGS = 118, 2  # largest of each
_LARGEST_HEADER = 1 << 20  # bytes; of ours it has about 1,500


def write_flat(
    batches: Iterable[Structures], path: str | Path, metadata: Mapping[str, str] | None = None
) -> int:
    """Write systems to a flat file, which has its name only when it is whole.

    Args:
        batches: of any sizes; read once, one at a time.
        path: ending in ``.safetensors``; replaced if it exists.
        metadata: further texts for the header.

    Returns:
        How many systems were written.

    Raises:
        ValueError: no systems, or a further value that JSON does not hold, by sid and name.
    """
    with temporary_path(path) as temporary, FlatWriter() as writer:
        for batch in batches:
            writer.add(batch)
        writer.finish(temporary, metadata)
        return writer.systems


class FlatWriter:
    """Collects systems in nameless temporary files, one a tensor, and joins them at the end."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._stack = ExitStack()
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._present: set[str] = set()
        self._ends = dict.fromkeys(("ptr", "sid_ptr", "info_ptr"), 0)
        self.systems = 0

    def __enter__(self) -> FlatWriter:
        for name in self._ends:
            self._append(name, np.zeros(1))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, batch: Structures, forces: NDArray[Any] | None = None) -> None:
        """Append systems.

        Args:
            batch: of the systems, on the CPU.
            forces: (N, 3), eV/Å; NaN where unknown.

        Raises:
            ValueError: a further value that JSON does not hold, by sid and name.
        """
        texts = [_info_text(batch, b) for b in range(len(batch))]
        values: dict[str, Any] = {
            name: getattr(batch, name, None) for name in (*_REQUIRED[1:], *_OPTIONAL)
        }
        values["force"] = forces
        for name, value in values.items():
            rows = batch.num_atoms if _TENSORS[name][1] == _ATOM else len(batch)
            if value is None:
                value = np.full((rows, *_TENSORS[name][2]), np.nan)
            else:
                self._present.add(name)
            self._append(name, np.asarray(value))
        self._append_fence("ptr", batch.natoms.tolist())
        if all(isinstance(sid, int) for sid in batch.sid):
            self._append("sid", np.array(batch.sid, np.int64))
        else:
            self._present.add("sid_text")
        self._append_texts("sid_text", "sid_ptr", [json.dumps(sid) for sid in batch.sid])
        self._append_texts("info", "info_ptr", texts)
        if any(text != "{}" for text in texts):
            self._present.add("info")
        self.systems += len(batch)

    def finish(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write the file.

        Raises:
            ValueError: no systems.
        """
        if not self.systems:
            raise ValueError(f"{path}: no systems to write")
        named = "sid_text" in self._present
        self._present |= {*_REQUIRED, *(("sid_ptr",) if named else ("sid",))}
        self._present |= {"info_ptr"} if "info" in self._present else set()
        header: dict[str, Any] = {
            "__metadata__": {"format": _FORMAT, "version": _VERSION, **(metadata or {})}
        }
        names, end = [name for name in _TENSORS if name in self._present], 0
        for name in names:
            kind, _, row = _TENSORS[name]
            size = self._files[name].tell()
            count = size // (np.dtype(_TYPES[kind]).itemsize * math.prod(row))
            offsets = [end, end + size]
            header[name] = {"dtype": kind, "shape": [count, *row], "data_offsets": offsets}
            end += size
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with path.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in names:
                self._files[name].seek(0)
                shutil.copyfileobj(self._files[name], file, 1 << 20)

    def _append(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._files:
            opened = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed by the stack
            self._files[name] = self._stack.enter_context(opened)
        self._files[name].write(values.astype(_TYPES[_TENSORS[name][0]]).tobytes())

    def _append_fence(self, name: str, lengths: Sequence[int]) -> None:
        ends = self._ends[name] + np.cumsum(lengths, dtype=np.int64)
        self._append(name, ends)
        self._ends[name] = int(ends[-1])

    def _append_texts(self, name: str, fence: str, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._append(name, np.frombuffer(b"".join(encoded), np.uint8))
        self._append_fence(fence, [len(text) for text in encoded])


def _info_text(batch: Structures, b: int) -> str:
    info = {name: values[b] for name, values in batch.info.items() if values[b] is not None}
    try:
        return json.dumps(info)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"sid {batch.sid[b]}: info {list(info)} is not JSON: {error}") from None


class FlatDataset(StructuresDataset):
    """The systems of a flat file; a batch of 32 of OC20's takes some 0.2 ms.

    It can be sent to other processes, which map the file themselves.

    Raises:
        ValueError: not a flat file, of a newer version, truncated, or with lengths that do not
            belong together, naming it.
    """

    def __init__(
        self, path: str | Path, options: ReadOptions | None = None, *, notes: Notes | None = None
    ) -> None:
        super().__init__(path, options, notes=notes)
        self.kind = "flat file"
        self.metadata, self._layout = _read_header(self.path)
        self._finish(_checked_count(self.path, self._tensors))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tensors"}

    @cached_property
    def _tensors(self) -> dict[str, NDArray[Any]]:
        with readable(self.path):
            content = np.memmap(self.path, np.uint8, "r")
        return {
            name: np.ndarray(shape, _TYPES[kind], content, start)
            for name, (kind, shape, start) in self._layout.items()
        }

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.diff(self._tensors["ptr"])[self._rows]

    def _where(self, row: int) -> str:
        return f"{self.path}, system {row}"

    def _records(self, rows: Sequence[int]) -> list[Record]:
        return [self._record(row) for row in rows]

    def _record(self, row: int) -> dict[str, Any]:
        try:
            fields = self._gather([row])
        except ValueError as error:
            raise ValueError(f"{self._where(row)}: {error}") from None
        del fields["ptr"]
        record = {name: values[0] for name, values in fields.pop("info").items()}
        record["natoms"] = len(fields["tags"])
        for name, value in fields.items():
            if value is not None:
                one = value if name in _PER_ATOM else value[0]
                record[_OC20.get(name, name)] = one.item() if isinstance(one, np.generic) else one
        return record

    def _systems(self, rows: Sequence[int], notes: dict[str, str]) -> Structures:
        options = self.options
        names = (options.energy, options.energy_initial, options.positions_relaxed)
        if (options.ignore_energy or names == _DEFAULTS) and not options.layer_numbers:
            with suppress(ValueError):  # the decoder finds the record that is invalid
                structures = self._decoded(rows, notes)
                if structures is not None:
                    return structures
        return super()._systems(rows, notes)

    def _decoded(self, rows: Sequence[int], notes: dict[str, str]) -> Structures | None:
        """The fields as they are; None where the general decoder has to look at them."""
        fields = self._gather(rows)
        del fields["force"]
        if self.options.ignore_energy:
            fields |= dict.fromkeys(_OPTIONAL[:3])
        elif self.options.require_energy and fields["energy"] is None:
            return None
        numbers, tags, ptr = fields["atomic_numbers"], fields["tags"], fields["ptr"]
        valid = numbers.min() > 0 and numbers.max() <= _ELEMENTS and tags.max() <= _TAGS
        if not valid or not np.isfinite(fields["positions"]).all():
            return None
        if not np.maximum.reduceat(tags, ptr[:-1]).all():
            notes["tags"] = "all tags are 0, no atom is marked surface or adsorbate"
        if not fields["cell"].any(axis=(1, 2)).all():
            notes["cell"] = "no cell (taken as not periodic)"
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                value = value.astype(_MEMORY.get(name, value.dtype), copy=False)
                fields[name] = torch.from_numpy(value)
        return Structures(**fields)

    def _gather(self, rows: Sequence[int]) -> dict[str, Any]:
        """The fields of systems, as those of :class:`Structures`, and their forces.

        Optional ones are None where the file, or one of the systems, lacks them.
        """
        tensors, systems = self._tensors, np.asarray(rows, np.int64)
        starts, ends = tensors["ptr"][systems], tensors["ptr"][systems + 1]
        ptr = np.zeros(len(systems) + 1, np.int64)
        np.cumsum(ends - starts, out=ptr[1:])
        atoms = np.repeat(starts - ptr[:-1], ends - starts) + np.arange(ptr[-1])
        fields: dict[str, Any] = {"ptr": ptr, "info": {}}
        for name in (*_REQUIRED[1:], *_OPTIONAL):
            tensor = tensors.get(name)
            value = None if tensor is None else tensor[atoms if name in _PER_ATOM else systems]
            lacking = value is not None and name in _OPTIONAL and bool(np.isnan(value).any())
            fields[name] = None if lacking else value
        if "sid" in tensors:
            fields["sid"] = tuple(tensors["sid"][systems].tolist())
        else:
            fields["sid"] = tuple(self._texts("sid_text", "sid_ptr", systems))
        if "info" in tensors:
            values = self._texts("info", "info_ptr", systems)
            names = dict.fromkeys(name for value in values for name in value)
            fields["info"] = {name: tuple(value.get(name) for value in values) for name in names}
        return fields

    def _texts(self, name: str, fence: str, systems: NDArray[np.int64]) -> list[Any]:
        starts, ends = self._tensors[fence][systems], self._tensors[fence][systems + 1]
        pairs, texts = zip(starts.tolist(), ends.tolist(), strict=True), self._tensors[name]
        try:
            found = [json.loads(texts[start:end].tobytes()) for start, end in pairs]
            if all(isinstance(v, dict if name == "info" else int | str) for v in found):
                return found
            reason = "of another kind"
        except (ValueError, RecursionError) as error:
            reason = str(error)
        raise ValueError(
            f"{name} is not the JSON that it should be ({reason}): the file is damaged"
        )


Layout = dict[str, tuple[str, tuple[int, ...], int]]
"""Name → type, shape, and where its first byte is in the file."""


def _read_header(path: Path) -> tuple[dict[str, str], Layout]:
    """Metadata and layout, checked against the size of the file."""
    with readable(path), path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if size < 8 or length > min(size, _LARGEST_HEADER):
                raise ValueError("its first bytes are not a header")
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            if metadata.get("format") != _FORMAT:
                held = ", ".join(list(header)[:3])
                raise ValueError(f"it holds other tensors ({held}); is it a model's weights?")
            if metadata["version"] != _VERSION:
                raise ValueError(f"version {metadata['version']} needs a newer flt_mol")
            known = [name for name in header if name in _TENSORS]
            layout = {name: _entry(name, header[name], length + 8, size) for name in known}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a flat file of structures: {error}") from None
    return metadata, layout


def _entry(
    name: str, entry: Mapping[str, Any], offset: int, size: int
) -> tuple[str, tuple[int, ...], int]:
    kind, _, row = _TENSORS[name]
    shape = tuple(map(operator.index, entry["shape"]))
    start, end = map(operator.index, entry["data_offsets"])
    if entry["dtype"] != kind or shape[1:] != row:
        raise ValueError(f"{name} is {entry['dtype']} {shape}, expected {kind} (…, {row})")
    if not 0 <= start <= end or end - start != np.dtype(_TYPES[kind]).itemsize * math.prod(shape):
        raise ValueError(f"{name} of shape {shape} does not have {end - start} bytes")
    if offset + end > size:
        raise ValueError(f"{name} ends after byte {offset + end:,} of {size:,}: it is truncated")
    return kind, shape, offset + start


def _checked_count(path: Path, tensors: Mapping[str, NDArray[Any]]) -> int:
    """Number of systems, where all lengths belong together."""
    named = ("sid_text", "sid_ptr") if "sid_text" in tensors else ("sid",)
    for name in (*_REQUIRED, *named, *(("info_ptr",) if "info" in tensors else ())):
        if name not in tensors:
            raise ValueError(f"{path} is not a flat file of structures: it has no {name}")
    count = len(tensors["ptr"]) - 1
    rows = {_SYSTEM: count, _FENCE: count + 1, _ATOM: len(tensors["atomic_numbers"])}
    for name, tensor in tensors.items():
        expected = rows.get(_TENSORS[name][1], len(tensor))
        if len(tensor) != expected:
            raise ValueError(f"{path}: {name} has {len(tensor)} rows, expected {expected}")
    for fence, name in (("ptr", "positions"), ("sid_ptr", "sid_text"), ("info_ptr", "info")):
        if fence not in tensors or name not in tensors:
            continue
        ends = tensors[fence]
        if ends[0] != 0 or ends[-1] != len(tensors[name]) or (np.diff(ends) < 1).any():
            raise ValueError(f"{path}: {fence} does not divide {name} into systems: it is damaged")
    return count
