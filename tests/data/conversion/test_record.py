"""What may differ between a record and its copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flt_mol.data import convert, open_dataset


@pytest.mark.parametrize("suffix", ["lmdb", "aselmdb", "extxyz"])
@pytest.mark.parametrize("cell", [[8.0, 9.0, 20.0], torch.tensor([8.0, 9.0, 20.0])])
def test_cells_of_three_numbers(
    cell: Any, suffix: str, make_record: Any, source: Any, bits: Any, tmp_path: Path
) -> None:
    dataset = source([make_record(cell=cell)])
    convert(dataset, tmp_path / f"out.{suffix}", workers=1)
    assert bits(open_dataset(tmp_path / f"out.{suffix}")[0]) == bits(dataset[0])
    assert dataset[0].cell[0].diagonal().tolist() == [8.0, 9.0, 20.0]


@pytest.mark.parametrize("suffix", ["lmdb", "aselmdb", "extxyz"])
@pytest.mark.parametrize("sid", [-(2**63), 2**63 - 1])
def test_the_largest_sids(
    sid: int, suffix: str, make_record: Any, source: Any, bits: Any, tmp_path: Path
) -> None:
    dataset = source([make_record(sid=sid)])
    convert(dataset, tmp_path / f"out.{suffix}", workers=1)
    assert bits(open_dataset(tmp_path / f"out.{suffix}")[0]) == bits(dataset[0])
    assert dataset.batch([0]).sid == dataset[0].sid == (sid,)
