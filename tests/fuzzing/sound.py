"""One sound file of each kind that is read; the same bytes each time, but for ASE databases."""

from __future__ import annotations

import io
import json
import pickle
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch

__all__ = ["SOUND", "Sound", "lmdb_bytes", "record", "sound"]

_CELL = np.array([[5.1, 0.0, 0.0], [2.55, 4.4, 0.0], [0.0, 0.0, 20.2]])
_NUMBERS = np.array([78, 78, 78, 78, 6, 8])
_TAGS = np.array([0, 0, 1, 1, 2, 2])
_ADDRESS = re.compile(rb"X[\x01-\x20]\0\0\0\d{6,20}(?=[q\x8aeu])")


@dataclass(frozen=True)
class Sound:
    """A sound file: its suffix, records and bytes; of LMDB files also the keys and values."""

    suffix: str
    count: int
    data: bytes
    values: Mapping[bytes, bytes] | None = None


def record(number: int) -> dict[str, Any]:
    """A CO on four Pt atoms with OC20's fields, as numpy arrays and plain values."""
    rng = np.random.default_rng(number)
    positions = rng.uniform(0, 5, (6, 3)).astype(np.float32)
    positions[:, 2] = 5 + 2 * _TAGS
    return {
        "edge_index": np.arange(20).reshape(2, 10),
        "pos": positions,
        "cell": _CELL[None].astype(np.float32),
        "atomic_numbers": _NUMBERS.astype(np.float32),
        "natoms": 6,
        "tags": _TAGS,
        "fixed": (_TAGS == 0).astype(np.float32),
        "sid": 100 + number,
        "pos_relaxed": positions + np.float32(0.1),
        "y_init": 6.25,
        "y_relaxed": -1.25 - number,
    }


class _Named:
    """Stands for a class of that module and name, and for an object of it."""

    def __init__(self, module: str, name: str, state: Any = None) -> None:
        self.module, self.name, self.state = module, name, state


class _Pickler(pickle._Pickler):  # type: ignore[misc]
    """Writes PyG's names without PyG, and tensors without the addresses that they lay at."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = _Named("torch.storage", "_load_from_bytes"), (_legacy(value),)
            return torch._utils._rebuild_tensor_v2, (
                _Reduced(storage),
                0,
                tuple(value.shape),
                value.stride(),
                False,
                {},
            )
        return value.how if isinstance(value, _Reduced) else NotImplemented

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(value, _Named):
            return super().save(value, save_persistent_id)
        self.write(f"c{value.module}\n{value.name}\n".encode())
        if value.state is not None:
            self.save(())
            self.write(b"\x81")  # NEWOBJ
            self.save(value.state)
            self.write(b"b")  # BUILD
        return None

    def save_reduce(self, function: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(function, _Named):
            return super().save_reduce(function, args, *rest, **options)
        self.save(function)
        self.save(args)
        self.write(b"R")
        return None


class _Reduced:
    def __init__(self, how: Any) -> None:
        self.how = how


def _legacy(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's storage in torch's legacy format, its address replaced."""
    stream = io.BytesIO()
    storage = torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )
    torch.save(storage, stream, _use_new_zipfile_serialization=False)
    return _ADDRESS.sub(b"X\x07\0\0\x001234567", stream.getvalue())


def _dumps(value: Any, protocol: int = 4) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def _tensors(number: int) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in record(number).items()
    }


def _pyg1(number: int) -> bytes:
    return _dumps(_Named("torch_geometric.data.data", "Data", _tensors(number)), 2)


def _pyg2(number: int) -> bytes:
    state = {"_mapping": _tensors(number), "_parent": None}
    store = _Named("torch_geometric.data.storage", "GlobalStorage", state)
    return _dumps(_Named("torch_geometric.data.data", "Data", {"_store": store}), 2)


def lmdb_bytes(values: Mapping[bytes, bytes], chunk: int = 1000) -> bytes:
    """An LMDB file of these values, `chunk` of them in each commit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.lmdb"
        items = list(values.items())
        with lmdb.open(str(path), subdir=False, map_size=2**28, lock=False) as environment:
            for start in range(0, len(items), chunk):
                with environment.begin(write=True) as transaction:
                    for key, value in items[start : start + chunk]:
                        transaction.put(key, value)
        return path.read_bytes()


def _lmdb(
    encode: Callable[[int], bytes], count: int = 24, *, length: Any = None, chunk: int = 1000
) -> Sound:
    values = {str(i).encode(): encode(i) for i in range(count)}
    if length is not None:
        values[b"length"] = length
    return Sound(".lmdb", count, lmdb_bytes(values, chunk), values)


def _large(number: int) -> bytes:
    """Records of which some lie on pages of their own."""
    return pickle.dumps({**record(number), "graph": bytes(3000 * (number % 3))}, 4)


def _compact() -> Sound:
    from flt_mol.data.compact import encode
    from flt_mol.data.compact.blocks import in_blocks
    from flt_mol.data.compact.writing import write_compact

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.lmdb"
        blocks = in_blocks((encode(record(i), "x") for i in range(24)), 4)
        write_compact(path, blocks, 24, {"source": "sound"})
        return Sound(".lmdb", 24, path.read_bytes(), _values(path))


def _values(path: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        return dict(environment.begin().cursor())


def row(number: int) -> dict[str, Any]:
    """A row of ASE's database schema, as JSON holds it."""
    fields = record(number)

    def array(name: str, dtype: str) -> dict[str, Any]:
        value = np.asarray(fields[name]).astype(dtype)
        value = value[0] if name == "cell" else value
        return {"__ndarray__": [list(value.shape), dtype, value.ravel().tolist()]}

    held = {"name": "FixAtoms", "kwargs": {"indices": [0, 1]}}
    return {
        "numbers": array("atomic_numbers", "int64"),
        "positions": array("pos", "float64"),
        "cell": array("cell", "float64"),
        "pbc": {"__ndarray__": [[3], "bool", [True, True, True]]},
        "tags": array("tags", "int64"),
        "constraints": [held],
        "unique_id": f"{number:032x}",
        "ctime": 1.0,
        "mtime": 1.0,
        "user": "",
        "key_value_pairs": {"sid": fields["sid"], "y_relaxed": fields["y_relaxed"]},
        "data": {},
    }


def _aselmdb() -> Sound:
    values = {
        str(i + 1).encode(): zlib.compress(json.dumps(row(i), separators=(",", ":")).encode())
        for i in range(24)
    }
    values[b"nextid"] = zlib.compress(b"25")
    values[b"metadata"] = zlib.compress(b'{"source":"sound"}')
    values[b"deleted_ids"] = zlib.compress(b"[]")
    return Sound(".aselmdb", 24, lmdb_bytes(values), values)


def atoms(number: int) -> Any:
    """The record as ASE atoms, with constraint, tags, sid and target."""
    from ase import Atoms
    from ase.constraints import FixAtoms

    fields = record(number)
    info = {"sid": fields["sid"], "y_relaxed": fields["y_relaxed"]}
    held: Any = FixAtoms
    return Atoms(
        numbers=_NUMBERS,
        positions=fields["pos"],
        cell=_CELL,
        pbc=True,
        tags=_TAGS,
        info=info,
        constraint=held(indices=[0, 1]),
    )


def _ase(suffix: str, kind: str, count: int) -> Sound:
    import ase.io

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{suffix}"
        ase.io.write(path, [atoms(i) for i in range(count)], format=kind)
        return Sound(suffix, count, path.read_bytes())


def _database(suffix: str) -> Sound:
    import ase.db

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{suffix}"
        with ase.db.connect(path, use_lock_file=False) as database:
            for i in range(4):
                database.write(atoms(i), key_value_pairs=dict(atoms(i).info))
        return Sound(suffix, 4, path.read_bytes())


SOUND: dict[str, Callable[[], Sound]] = {
    "lmdb of PyG 1.x": lambda: _lmdb(_pyg1),
    "lmdb of PyG 2.x": lambda: _lmdb(_pyg2, length=pickle.dumps(24), chunk=5),
    "lmdb of dicts": lambda: _lmdb(lambda i: _dumps(_tensors(i)), 12, length=b"12"),
    "lmdb of arrays": lambda: _lmdb(lambda i: pickle.dumps(record(i), 5), chunk=7),
    "lmdb of zlib": lambda: _lmdb(lambda i: zlib.compress(pickle.dumps(record(i), 4)), 60),
    "lmdb of large records": lambda: _lmdb(_large, 30),
    "compact lmdb": _compact,
    "aselmdb": _aselmdb,
    "traj": lambda: _ase(".traj", "traj", 4),
    "extxyz": lambda: _ase(".extxyz", "extxyz", 4),
    "ase json": lambda: _database(".json"),
    "ase db": lambda: _database(".db"),
    "POSCAR": lambda: _ase(".vasp", "vasp", 1),
    "cif": lambda: _ase(".cif", "cif", 1),
}


@cache
def sound(kind: str) -> Sound:
    """The sound file of a kind, made once."""
    return SOUND[kind]()
