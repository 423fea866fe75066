"""Flat files: a whole split as one safetensors file, memory-mapped, of which a batch is a slice.

Systems lie one after the other, as in `Structures`: B systems, N atoms, a tensor for each field.

- ``ptr`` int64 (B + 1,): first atom of each system, and N at the end
- ``atomic_numbers`` uint8 (N,): 1 to 118
- ``tags`` uint8 (N,): 0 below the surface, 1 surface, 2 adsorbate
- ``fixed`` bool (N,): held fixed in the relaxation
- ``positions`` float32 (N, 3): Å, initial structure
- ``cell`` float32 (B, 3, 3): Å, rows are the lattice vectors
- ``pbc`` bool (B, 3)
- ``sid`` int64 (B,): in ``info``, if one name is not a whole number
- ``energy`` float64 (B,): eV, the target; optional, NaN where there is none
- ``energy_initial`` float64 (B,): eV, before relaxation; likewise
- ``positions_relaxed`` float32 (N, 3): Å; likewise
- ``force`` float32 (N, 3): eV/Å, at ``positions``; likewise
- ``info`` uint8 (bytes,): further plain values, a JSON object a system; optional
- ``info_ptr`` int64 (B + 1,): where each of them begins

JSON is UTF-8. The metadata has one key, ``flt_mol.flat``, a JSON object with ``version`` (1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.schema import Record
from flt_mol.files import foreign, readable, temporary_path
from flt_mol.structures import Structures

_KEY, _VERSION = "flt_mol.flat", 1  # one key: safetensors writes several in any order
# Name → type, what its rows are, shape of a row.
_TENSORS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "ptr": ("<i8", "fence", ()),
    "sid": ("<i8", "system", ()),
    "info_ptr": ("<i8", "fence", ()),
    "energy": ("<f8", "system", ()),
    "energy_initial": ("<f8", "system", ()),
    "cell": ("<f4", "system", (3, 3)),
    "positions": ("<f4", "atom", (3,)),
    "positions_relaxed": ("<f4", "atom", (3,)),
    "force": ("<f4", "atom", (3,)),
    "atomic_numbers": ("u1", "atom", ()),
    "tags": ("u1", "atom", ()),
    "fixed": ("?", "atom", ()),
    "pbc": ("?", "system", (3,)),
    "info": ("u1", "byte", ()),
}
_PER_ATOM = frozenset(name for name, (_, rows, _) in _TENSORS.items() if rows == "atom")
_REQUIRED = ("atomic_numbers", "tags", "fixed", "positions", "cell", "pbc")
_OPTIONAL = ("energy", "energy_initial", "positions_relaxed", "force")
_OC20 = {"energy": "y_relaxed", "energy_initial": "y_init", "positions_relaxed": "pos_relaxed"}
_MEMORY = {"atomic_numbers": np.int64, "tags": np.int64}  # types of Structures


def write_flat(batches: Iterable[Structures], path: str | Path) -> None:
    """Write systems to a flat file, which gets its name when it is complete.

    Args:
        batches: of any sizes.
        path: ending in ``.safetensors``; replaced if it exists.

    Raises:
        ValueError: no systems, or a further value that JSON does not hold, by sid.
    """
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_REQUIRED, *_OPTIONAL)}
    natoms, sids, infos = list[int](), list[int | str](), list[dict[str, Any]]()
    for batch in batches:
        for name, parts in columns.items():
            value = getattr(batch, "forces" if name == "force" else name)
            shape = (batch.num_atoms if name in _PER_ATOM else len(batch), *_TENSORS[name][2])
            found = np.broadcast_to(np.nan, shape) if value is None else np.asarray(value)
            parts.append(found.astype(_TENSORS[name][0]))
        natoms += batch.natoms.tolist()
        sids += batch.sid
        for b in range(len(batch)):
            infos.append({n: v[b] for n, v in batch.info.items() if v[b] is not None})
    if not natoms:
        raise ValueError(f"{path}: no systems to write")
    # safetensors takes the bytes in the order that they have in memory.
    tensors = {n: np.ascontiguousarray(np.concatenate(parts)) for n, parts in columns.items()}
    for name in _OPTIONAL:
        if np.isnan(tensors[name]).all():
            del tensors[name]
    tensors["ptr"] = _fence(natoms)
    if all(isinstance(sid, int) for sid in sids):
        tensors["sid"] = np.array(sids, np.int64)
    else:
        infos = [{**info, "sid": sid} for info, sid in zip(infos, sids, strict=True)]
    if any(infos):
        texts = [_text(info, sid) for info, sid in zip(infos, sids, strict=True)]
        tensors["info"] = np.frombuffer(b"".join(texts), np.uint8)
        tensors["info_ptr"] = _fence([len(text) for text in texts])
    with temporary_path(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata={_KEY: json.dumps({"version": _VERSION})})
        temporary.chmod(mode)  # safetensors lets only the owner read its files


def _text(info: Mapping[str, Any], sid: int | str) -> bytes:
    try:
        return json.dumps(info).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"sid {sid}: info {list(info)} is not JSON: {error}") from None


def _fence(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


class FlatDataset(StructuresDataset):
    """The systems of a flat file; a batch of 32 of OC20's takes some 0.2 ms.

    It can be sent to other processes, which map the file themselves.

    Raises:
        ValueError: not a flat file, of a newer version, truncated, or with lengths that do not
            belong together, naming it.
    """

    kind = "flat file"

    def _open(self) -> int:
        self._tensors = _read(self.path)
        return len(self._tensors["ptr"]) - 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tensors"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tensors = _read(self.path)

    def natoms(self) -> NDArray[np.int64]:
        """Atoms of each system (len,)."""
        return np.diff(self._tensors["ptr"])[self._rows]

    def _records(self, rows: Sequence[int]) -> list[Record]:
        return [self._record(row) for row in rows]

    def _record(self, row: int) -> dict[str, Any]:
        fields = self._gather([row])
        info = {name: values[0] for name, values in fields.pop("info").items()}
        record: dict[str, Any] = {**info, "sid": fields.pop("sid")[0]}
        record["natoms"] = int(fields.pop("ptr")[1])
        record["pos"] = fields.pop("positions")
        for name, value in fields.items():
            if value is not None:
                one = value if name in _PER_ATOM else value[0]
                record[_OC20.get(name, name)] = one.item() if isinstance(one, np.generic) else one
        return record

    def _systems(self, rows: Sequence[int], notes: dict[str, str]) -> Structures:
        options = self.options
        names = (options.energy, options.energy_initial, options.positions_relaxed)
        as_stored = options.ignore_energy or names == tuple(_OC20.values())
        if as_stored and options.tag_slab is None:
            with suppress(ValueError):  # the decoder finds the record that is invalid
                structures = self._decoded(rows)
                if structures is not None:
                    return structures
        return super()._systems(rows, notes)

    def _decoded(self, rows: Sequence[int]) -> Structures | None:
        """The fields as they are; None where the general decoder has to look at them."""
        fields = self._gather(rows)
        forces = fields.pop("force")
        if forces is None:
            forces = np.full_like(fields["positions"], np.nan)
        fields["forces"] = forces if self.options.forces else None
        if self.options.ignore_energy:
            fields |= dict.fromkeys((*_OC20, "forces"))
        elif self.options.require_energy and fields["energy"] is None:
            return None
        numbers = fields["atomic_numbers"]
        valid = numbers.min() >= 1 and numbers.max() <= 118 and fields["tags"].max() <= 2
        if not valid or not np.isfinite(fields["positions"]).all():
            return None
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                value = value.astype(_MEMORY.get(name, value.dtype), copy=False)
                fields[name] = torch.from_numpy(value)
        return Structures(**fields)

    def _gather(self, rows: Sequence[int]) -> dict[str, Any]:
        """The fields of systems by their names in the file.

        Optional ones are None where the file, or one of the systems, lacks them.
        """
        tensors, systems = self._tensors, np.asarray(rows, np.int64)
        starts, ends = tensors["ptr"][systems], tensors["ptr"][systems + 1]
        ptr = _fence(ends - starts)
        atoms = np.repeat(starts - ptr[:-1], ends - starts) + np.arange(ptr[-1])
        fields: dict[str, Any] = {"ptr": ptr}
        for name in (*_REQUIRED, *_OPTIONAL):
            tensor = tensors.get(name)
            value = None if tensor is None else tensor[atoms if name in _PER_ATOM else systems]
            lacking = value is not None and name in _OC20 and bool(np.isnan(value).any())
            fields[name] = None if lacking else value
        values = [self._info(row) for row in rows] if "info" in tensors else []
        if "sid" in tensors:
            fields["sid"] = tuple(tensors["sid"][systems].tolist())
        else:
            fields["sid"] = tuple(value.pop("sid") for value in values)
        names = dict.fromkeys(name for value in values for name in value)
        fields["info"] = {name: tuple(value.get(name) for value in values) for name in names}
        return fields

    def _info(self, row: int) -> dict[str, Any]:
        start, end = self._tensors["info_ptr"][row : row + 2]
        try:
            info = json.loads(self._tensors["info"][start:end].tobytes())
            if not isinstance(info, dict):
                raise ValueError(f"{info!r:.20}")
            if "sid" not in self._tensors and not isinstance(info.get("sid"), int | str):
                raise ValueError("no sid")
        except (ValueError, RecursionError) as error:
            text = f"info is not valid JSON: damaged ({error})"
            raise ValueError(f"{self._where(row)}: {text}") from None
        return info


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors, memory-mapped, where all lengths belong together."""
    try:
        with readable(path), safe_open(path, "pt") as file:
            metadata, names = file.metadata() or {}, file.keys()
            if _KEY not in metadata:
                held = ", ".join(list(names)[:3])
                raise ValueError(f"it holds other tensors ({held}); is it a model's weights?")
            if (version := json.loads(metadata[_KEY])["version"]) != _VERSION:
                raise ValueError(f"version {version} needs a newer flt_mol")
            tensors = {name: file.get_tensor(name).numpy() for name in names if name in _TENSORS}
        _check(tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        found = foreign(path) or error
        raise ValueError(f"{path} is not a flat file of structures: {found}") from None
    return tensors


def _check(tensors: Mapping[str, NDArray[Any]]) -> None:
    texts = ("info_ptr", "info") if "info" in tensors or "sid" not in tensors else ()
    for name in ("ptr", *_REQUIRED, *texts):
        if name not in tensors:
            raise ValueError(f"it has no {name}")
    fences = len(tensors["ptr"])
    rows = {"system": fences - 1, "fence": fences, "atom": len(tensors["atomic_numbers"])}
    for name, tensor in tensors.items():
        kind, of, row = _TENSORS[name]
        shape = (rows.get(of, len(tensor)), *row)
        if tensor.dtype != kind or tensor.shape != shape:
            found = f"{tensor.dtype} {tensor.shape}"
            raise ValueError(f"{name} is {found}, expected {np.dtype(kind)} {shape}")
    for fence, name in (("ptr", "positions"), *([texts] if texts else [])):
        ends = tensors[fence]
        if ends[0] != 0 or ends[-1] != len(tensors[name]) or (np.diff(ends) < 1).any():
            raise ValueError(f"{fence} does not divide {name} into systems: it is damaged")
