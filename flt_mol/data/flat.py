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
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flt_mol.data.dataset import Notes, StructuresDataset
from flt_mol.data.options import ReadOptions
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
_REQUIRED = ("ptr", "atomic_numbers", "tags", "fixed", "positions", "cell", "pbc")
_OPTIONAL = ("energy", "energy_initial", "positions_relaxed", "force")
_MEMORY = {name: _TYPES[kind] for name, (kind, _, _) in _TENSORS.items()}  # types of Structures
_MEMORY |= {"atomic_numbers": "<i8", "tags": "<i8"}
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
    except (TypeError, ValueError, RecursionError):
        for name, value in info.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError):
                raise ValueError(
                    f"sid {batch.sid[b]}: {name} is a {type(value).__name__}, which JSON does not "
                    "hold; remove it from the record"
                ) from None
        raise


class FlatDataset(StructuresDataset):
    """The systems of a flat file; a batch of 32 of OC20's takes some 0.2 ms.

    It can be sent to other processes, which map the file themselves.

    Args:
        path: the file.
        options: how records are read.
        notes: where warnings go.
        prefix: put before a record's number in :meth:`default_sid`.

    Raises:
        ValueError: not a flat file, of a newer version, truncated, or with lengths that do not
            belong together, naming it.
    """

    def __init__(
        self,
        path: str | Path,
        options: ReadOptions | None = None,
        *,
        notes: Notes | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(path, options, notes=notes)
        self._prefix = prefix
        self.metadata, self._layout = _read_header(self.path)
        self._places = np.arange(_checked_count(self.path, self._tensors, self._layout))
        self._check()

    kind = "flat file"

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

    def __len__(self) -> int:
        return len(self._places)

    def where(self, index: int) -> str:
        """File and number of system `index`, for errors."""
        return f"{self.path}, system {int(self._places[index])}"

    def default_sid(self, index: int) -> int | str:
        """The number; a flat file names every system."""
        place = int(self._places[index])
        return f"{self._prefix}{place}" if self._prefix else place

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.diff(self._tensors["ptr"])[self._places]

    def record(self, index: int) -> dict[str, Any]:
        """The fields of system `index` by OC20's names.

        Raises:
            ValueError: a name or further values that are not JSON.
        """
        place = self._places[[index]]
        try:
            fields = self._gather(place)
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from None
        names = {"y_relaxed": "energy", "y_init": "energy_initial"}
        energies = {name: fields[own] for name, own in names.items()}
        return {
            **{name: values[0] for name, values in fields["info"].items()},
            "sid": fields["sid"][0],
            "natoms": len(fields["atomic_numbers"]),
            "atomic_numbers": fields["atomic_numbers"],
            "pos": fields["positions"],
            "cell": fields["cell"][0],
            "pbc": fields["pbc"][0],
            "tags": fields["tags"],
            "fixed": fields["fixed"],
            "pos_relaxed": fields["positions_relaxed"],
            **{name: None if e is None else float(e[0]) for name, e in energies.items()},
            **({} if fields["force"] is None else {"force": fields["force"]}),
        }

    def _at_once(self, indices: Sequence[int]) -> Structures | None:
        options = self.options
        names = (options.energy, options.energy_initial, options.positions_relaxed)
        if not options.ignore_energy and names != ("y_relaxed", "y_init", "pos_relaxed"):
            return None
        try:
            fields = self._gather(self._places[indices])
        except ValueError:
            return None
        del fields["force"]
        if options.ignore_energy:
            fields |= {"energy": None, "energy_initial": None, "positions_relaxed": None}
        numbers, tags, positions = (fields[n] for n in ("atomic_numbers", "tags", "positions"))
        sound = numbers.min() > 0 and numbers.max() <= _ELEMENTS and tags.max() <= _TAGS
        if not (sound and bool(np.isfinite(positions).all())):
            return None
        ptr = fields["ptr"]
        if "tags" not in self.notes.seen and not np.maximum.reduceat(tags, ptr[:-1]).all():
            return None
        tensors = {
            name: torch.from_numpy(value.astype(_MEMORY[name], copy=False))
            for name, value in fields.items()
            if isinstance(value, np.ndarray)
        }
        return Structures(**{**fields, **tensors})

    def _gather(self, places: NDArray[np.int64]) -> dict[str, Any]:
        """The fields of systems, as those of :class:`Structures`, and their forces.

        Optional ones are None where the file, or one of the systems, lacks them.
        """
        tensors = self._tensors
        starts, ends = tensors["ptr"][places], tensors["ptr"][places + 1]
        ptr = np.zeros(len(places) + 1, np.int64)
        np.cumsum(ends - starts, out=ptr[1:])
        atoms = np.repeat(starts - ptr[:-1], ends - starts) + np.arange(ptr[-1])
        fields: dict[str, Any] = {"ptr": ptr, "sid": self._sids(places), "info": self._info(places)}
        for name in (*_REQUIRED[1:], *_OPTIONAL):
            tensor = tensors.get(name)
            rows = atoms if _TENSORS[name][1] == _ATOM else places
            value = None if tensor is None else tensor[rows]
            lacking = value is not None and name in _OPTIONAL and bool(np.isnan(value).any())
            fields[name] = None if lacking else value
        return fields

    def _sids(self, places: NDArray[np.int64]) -> tuple[int | str, ...]:
        if "sid" in self._tensors:
            return tuple(self._tensors["sid"][places].tolist())
        return tuple(self._texts("sid_text", "sid_ptr", places))

    def _info(self, places: NDArray[np.int64]) -> dict[str, tuple[Any, ...]]:
        if "info" not in self._tensors:
            return {}
        values = self._texts("info", "info_ptr", places)
        if not all(isinstance(value, dict) for value in values):
            raise ValueError("info is not a JSON object: the file is damaged")
        names = dict.fromkeys(name for value in values for name in value)
        return {name: tuple(value.get(name) for value in values) for name in names}

    def _texts(self, name: str, fence: str, places: NDArray[np.int64]) -> list[Any]:
        starts, ends = self._tensors[fence][places], self._tensors[fence][places + 1]
        texts = self._tensors[name]
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        try:
            return [json.loads(texts[start:end].tobytes()) for start, end in pairs]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON ({error}): the file is damaged") from None

    def _keep(self, indices: list[int]) -> None:
        self._places = self._places[indices]


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


def _checked_count(path: Path, tensors: Mapping[str, NDArray[Any]], layout: Layout) -> int:
    """Number of systems, where all lengths belong together."""
    named = ("sid_text", "sid_ptr") if "sid_text" in layout else ("sid",)
    for name in (*_REQUIRED, *named, *(("info_ptr",) if "info" in layout else ())):
        if name not in layout:
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
