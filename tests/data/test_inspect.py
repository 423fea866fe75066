"""Summaries count what is there and list what is wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import molecule

from flt_mol.data import from_ase, open_dataset
from flt_mol.data.inspect import render, summarise


@pytest.fixture
def path(write_lmdb: Any, make_record: Any) -> Any:
    """Two good records, an outlier, and a bad one."""
    return write_lmdb(
        {
            0: make_record(sid=1, y_relaxed=-1.0),
            1: make_record(sid=2, y_relaxed=np.float64(-2.0), facet="111"),
            2: make_record(sid=3, y_relaxed=-5332.0, pos_relaxed=None),
            3: make_record(sid=4, y_relaxed=float("nan")),
        }
    )


def test_counts(path: Any) -> None:
    summary = summarise(open_dataset(path))
    assert summary["path"] == str(path)
    assert summary["count"] == 4
    assert summary["fields"]["pos"] == 4
    assert summary["fields"]["facet"] == 1
    assert summary["missing"] == {"pos_relaxed": 1}
    assert summary["dtypes"]["atomic_numbers"] == ["tensor float32, 1 axes"]
    assert summary["dtypes"]["y_relaxed"] == ["float"]
    assert summary["energy"]["count"] == 3
    assert summary["energy"]["min"] == -5332.0
    assert summary["energy"]["max"] == -1.0
    assert summary["energy"]["mean"] == pytest.approx(-5335.0 / 3)
    assert summary["energy"]["std"] == pytest.approx(np.std([-1.0, -2.0, -5332.0]))
    assert summary["elements"] == {"C": 3, "O": 3, "Pt": 3}
    assert summary["atoms"] == {"count": 3, "min": 6, "median": 6, "mean": 6, "max": 6, "std": 0}
    assert summary["pbc"] == {"TTT": 3}
    assert summary["tags"] == {"0": 6, "1": 6, "2": 6}
    assert summary["fixed"] == pytest.approx(1 / 3)


def test_what_is_wrong_is_listed(path: Any) -> None:
    summary = summarise(open_dataset(path))
    assert summary["outliers"] == [{"sid": 3, "energy": -5332.0}]
    assert len(summary["problems"]) == 1
    assert "sid 4: y_relaxed is nan" in summary["problems"][0]
    skipping = summarise(open_dataset(path, on_error="skip"))
    assert skipping["count"] == 3
    assert skipping["skipped"] == summary["problems"]
    assert skipping["problems"] == []
    text = render(summary)
    for word in ("4 systems", "sid 3: -5332 eV", "sid 4: y_relaxed is nan", "Pt 3", "facet"):
        assert word in text


def test_json(path: Any) -> None:
    summary = summarise(open_dataset(path))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_json_without_infinity(write_lmdb: Any, make_record: Any) -> None:
    values = {0: make_record(y_relaxed=1.7e308), 1: make_record(y_relaxed=-1.7e308, sid=2)}
    summary = summarise(open_dataset(write_lmdb(values)))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["energy"]["max"] == 1.7e308
    assert summary["energy"]["std"] is None
    assert "std beyond float64" in render(summary)


def test_repeated_sids(write_lmdb: Any, make_record: Any) -> None:
    dataset = open_dataset(write_lmdb({0: make_record(), 1: make_record()}))
    summary = summarise(dataset)
    assert summary["repeated_sids"] == [101]
    assert "1 repeated sids:\n  101" in render(summary)


def test_lists_of_structures_and_no_targets() -> None:
    summary = summarise([from_ase(molecule("H2O"), sid="water")])
    assert summary["count"] == 1
    assert summary["energy"] is None
    assert summary["fields"] == {}
    assert summary["pbc"] == {"FFF": 1}
    assert "no targets" in render(summary)


def test_unread_graphs_stay_bytes(write_lmdb: Any, make_record: Any) -> None:
    record = make_record(edge_index=torch.zeros(2, 5, dtype=torch.int64))
    summary = summarise(open_dataset(write_lmdb(dict.fromkeys(range(20), record))))
    assert summary["fields"]["edge_index"] == 20
    assert summary["dtypes"]["edge_index"] == ["tensor int64, 2 axes"]
