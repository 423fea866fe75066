"""Sources of records to convert, and how to compare what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data import open_dataset
from flt_mol.structures import Structures


def _bits(structures: Structures) -> dict[str, Any]:
    """All fields in a form that is equal only if every bit and type is."""
    found: dict[str, Any] = {}
    for field in fields(Structures):
        value = getattr(structures, field.name)
        if isinstance(value, torch.Tensor):
            value = (value.dtype, tuple(value.shape), value.numpy().tobytes())
        elif field.name == "info":
            value = sorted((name, repr(values)) for name, values in value.items())
        found[field.name] = repr(value)
    return found


def _variety(make_record: Callable[..., dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Records that differ in positions, sid, energies and one further value."""
    records = []
    for i in range(count):
        rng = np.random.default_rng(i)
        positions = torch.tensor(rng.uniform(-3, 9, (6, 3)), dtype=torch.float32)
        records.append(
            make_record(
                pos=positions,
                pos_relaxed=positions + torch.tensor(rng.normal(size=(6, 3))).float(),
                sid=1000 + 7 * i,
                y_relaxed=float(rng.normal()),
                y_init=float(rng.normal()),
                slab=i // 3,
            )
        )
    return records


@pytest.fixture
def bits() -> Callable[[Structures], dict[str, Any]]:
    """See `_bits`."""
    return _bits


@pytest.fixture
def variety(make_record: Callable[..., dict[str, Any]]) -> Callable[[int], list[dict[str, Any]]]:
    """Makes some records, see `_variety`."""
    return lambda count: _variety(make_record, count)


@pytest.fixture
def source(variety: Any, write_lmdb: Any, tmp_path: Path) -> Callable[..., Any]:
    """An LMDB data set of some records, in a folder of its own."""

    def make(records: Any = 20, **options: Any) -> Any:
        (tmp_path / "source").mkdir(exist_ok=True)
        records = variety(records) if isinstance(records, int) else records
        path = write_lmdb(dict(enumerate(records)), name="source/data.lmdb")
        return open_dataset(path, **options)

    return make
