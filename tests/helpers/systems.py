"""Structures made on the spot, and files of records like OC20's."""

import pickle
import zlib
from pathlib import Path

import lmdb
import numpy as np
import torch

from flt_mol.structures import Structures


def make_system(sid=0, atoms=5, **changes):
    """A periodic system with tags 0, 1 and 2, targets and relaxed positions."""
    rng = np.random.default_rng([7, atoms, abs(hash(sid)) if isinstance(sid, int) else 0])
    positions = rng.uniform(0, 8, (atoms, 3))
    fields = {
        "cell": np.diag([9.0, 8.5, 20.0]) + np.triu(np.ones((3, 3)), 1),
        "pbc": [True, True, False],
        "tags": [2 if i == atoms - 1 else i % 2 for i in range(atoms)],
        "fixed": [i % 2 == 0 and i < atoms - 1 for i in range(atoms)],
        "energy": float(rng.normal()),
        "energy_initial": float(rng.normal()),
        "positions_relaxed": positions + rng.normal(0, 0.1, (atoms, 3)),
    }
    return Structures.single(
        rng.integers(1, 80, atoms), positions, sid=sid, **{**fields, **changes}
    )


def make_systems(count, **changes):
    """Systems of 3 to 9 atoms with sids 100, 101, …"""
    return [make_system(100 + i, 3 + (i * 5) % 7, **changes) for i in range(count)]


def same(a, b):
    """Whether two batches agree in every field, bit for bit."""
    for name in Structures.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif repr(x) != repr(y):
            return False
    return True


def make_record(sid, n=12, graph=False):
    """A record with OC20's fields; the graph makes it as large as theirs."""
    rng = np.random.default_rng([3, sid])
    tags = np.array([i % 2 for i in range(n - 1)] + [2])
    pos = rng.uniform(0, 12, (n, 3)).astype(np.float32)
    pos[:, 2] = 9 * tags + np.arange(n) * 8 / n  # none on another
    record = {
        "pos": pos,
        "pos_relaxed": pos + rng.normal(0, 0.1, (n, 3)).astype(np.float32),
        "cell": np.diag([12.0, 12.0, 30.0]).astype(np.float32)[None],
        "atomic_numbers": rng.integers(1, 80, n).astype(np.float32),
        "tags": tags,
        "fixed": rng.integers(0, 2, n).astype(np.float32),
        "natoms": n,
        "sid": sid,
        "y_init": float(rng.normal()),
        "y_relaxed": float(rng.normal()),
        "force": rng.normal(size=(n, 3)).astype(np.float32),
        "facet": "111",
        "slab": sid // 3,
    }
    if graph:
        record["edge_index"] = rng.integers(0, n, (2, 40 * n))
        record["cell_offsets"] = rng.integers(-1, 2, (40 * n, 3))
    return record


def write_records(path: Path, records) -> Path:
    """An LMDB file of pickled records, or of bytes as they are."""
    environment = lmdb.open(str(path), subdir=False, map_size=1 << 28, lock=False)
    with environment, environment.begin(write=True) as transaction:
        for i, record in enumerate(records):
            data = record if isinstance(record, bytes) else pickle.dumps(record)
            transaction.put(str(i).encode(), data)
    return path


def compressed(record) -> bytes:
    """As the shipped data sets store a record."""
    return zlib.compress(pickle.dumps(record, protocol=4))
