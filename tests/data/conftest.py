"""Records and LMDB files like those that users have, made on the spot."""

from __future__ import annotations

import pickle
import sys
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

CELL = [[5.1, 0.0, 0.0], [2.55, 4.4, 0.0], [0.0, 0.0, 20.2]]


def _record(**changes: Any) -> dict[str, Any]:
    """A CO on four Pt atoms in OC20's types; `changes` replace fields, ... removes them."""
    rng = np.random.default_rng(3)
    positions = torch.tensor(rng.uniform(0, 5, (6, 3)), dtype=torch.float32)
    record = {
        "edge_index": torch.arange(20).reshape(2, 10),
        "pos": positions,
        "cell": torch.tensor([CELL]),
        "atomic_numbers": torch.tensor([78.0, 78.0, 78.0, 78.0, 6.0, 8.0]),
        "natoms": 6,
        "tags": torch.tensor([0, 0, 1, 1, 2, 2]),
        "fixed": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        "sid": 101,
        "pos_relaxed": positions + 0.1,
        "y_init": 6.25,
        "y_relaxed": -1.25,
        **changes,
    }
    return {name: value for name, value in record.items() if value is not ...}


def _write(path: Path, values: Mapping[Any, Any], subdir: bool = False) -> Path:
    """An LMDB file; int keys become ascii, values that are no bytes are pickled."""
    if path.is_file():
        path.unlink()
    # Without a lock, no lock file is left that the tests of the reader could find.
    environment = lmdb.open(str(path), subdir=subdir, map_size=2**24, lock=False)
    with environment, environment.begin(write=True) as transaction:
        for key, value in values.items():
            name = key if isinstance(key, bytes) else str(key).encode()
            data = value if isinstance(value, bytes) else pickle.dumps(value, protocol=4)
            transaction.put(name, data)
    return path


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """Makes a record, see `_record`."""
    return _record


@pytest.fixture
def write_lmdb(tmp_path: Path) -> Callable[..., Path]:
    """Writes an LMDB file into the test's folder (or to an absolute path), see `_write`."""
    return lambda values, name="data.lmdb", **options: _write(tmp_path / name, values, **options)


@pytest.fixture
def compressed() -> Callable[[Any], bytes]:
    """A value as the data sets of this library store it."""
    return lambda value: zlib.compress(pickle.dumps(value, protocol=4))


@pytest.fixture
def pickle_pyg() -> Callable[..., bytes]:
    """Pickles fields as PyG 1.x (state in `__dict__`) or 2.x (in `_store`) would.

    The names that the pickle holds are those of PyG; its modules are there only meanwhile.
    """

    def make(fields: Mapping[str, Any], version: int = 1, protocol: int = 4) -> bytes:
        modules = ["torch_geometric", "torch_geometric.data"]
        data = types.ModuleType("torch_geometric.data.data")
        storage = types.ModuleType("torch_geometric.data.storage")
        for module, names in (
            (data, ["Data", "DataEdgeAttr", "DataTensorAttr"]),
            (storage, ["GlobalStorage"]),
        ):
            for name in names:
                kind = type(name, (), {"__module__": module.__name__, "__qualname__": name})
                setattr(module, name, kind)
        fakes = {name: types.ModuleType(name) for name in modules}
        fakes |= {data.__name__: data, storage.__name__: storage}
        before = {name: sys.modules.get(name) for name in fakes}
        sys.modules.update(fakes)
        try:
            record = data.Data()
            record.__dict__.update(fields)
            if version == 2:
                store = storage.GlobalStorage()
                store.__dict__.update(_mapping=dict(fields), _parent=record)
                record.__dict__.clear()
                record.__dict__.update(
                    _edge_attr_cls=data.DataEdgeAttr,
                    _tensor_attr_cls=data.DataTensorAttr,
                    _store=store,
                )
            return pickle.dumps(record, protocol=protocol)
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    return make
