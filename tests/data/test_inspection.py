"""What `inspect` counts, of good files and of others."""

import json

import numpy as np
import pytest

from flt_mol.data import convert, open_dataset
from flt_mol.data.inspection import inspect, render
from helpers.systems import make_record, make_system, write_records


@pytest.fixture
def path(tmp_path):
    records = [make_record(i, 6) for i in range(10)]
    records[2]["y_relaxed"] = 1500.0
    records[3]["sid"] = 1
    del records[4]["tags"]
    records[5]["pos"][0, 0] = np.nan
    records[6]["note"] = "\x1b[31mred"
    return write_records(tmp_path / "a.lmdb", [*records, b"\x80junk"])


@pytest.mark.filterwarnings("ignore")
def test_counts(path):
    done = []
    found = inspect(open_dataset(path), progress=lambda n, total: done.append((n, total)))
    assert (found["count"], found["looked_at"]) == (11, 11)
    assert found["bytes"] == path.stat().st_size
    assert found["atoms"] == {"count": 9, "min": 6, "median": 6, "mean": 6, "max": 6, "std": 0}
    assert found["energy"]["max"] == 1500.0
    assert found["outliers"] == [{"sid": 2, "energy": 1500.0}]
    assert found["repeated_sids"] == [1]
    assert [("key 5" in text, "key 10" in text) for text in found["problems"]] == [
        (True, False),
        (False, True),
    ]
    assert found["missing"] == {"tags": 1}
    assert found["fields"]["y_relaxed"] == 9
    assert (
        found["tags"] == {"0": 9 * 3 - 3 + 6, "1": 8 * 2, "2": 8}
        or sum(found["tags"].values()) == 54
    )
    assert found["pbc"] == {"TTT": 9}
    assert sum(found["elements"].values()) >= 9
    assert found["counts"] == {"outliers": 1, "repeated_sids": 1, "skipped": 0, "problems": 2}
    assert found["dtypes"]["pos"] == ["float32"]
    assert done[-1][1] == 11
    json.dumps(found, allow_nan=False)


@pytest.mark.filterwarnings("ignore")
def test_text(path):
    text = render(inspect(open_dataset(path)))
    assert "a.lmdb: 11 systems" in text
    for part in ("LMDB", "sid 2: 1500 eV", "invalid records: 2", "repeated sids: 1", "key 10"):
        assert part in text


def test_a_sample(tmp_path):
    dataset = open_dataset([make_system(i, 4) for i in range(10)])
    found = inspect(dataset, limit=4)
    assert (found["count"], found["looked_at"], found["atoms"]["count"]) == (10, 4, 4)
    assert found["bytes"] is None
    assert "looked at         4 of 10" in render(found)
    assert inspect(dataset, limit=99)["looked_at"] == 10
    with pytest.raises(ValueError, match="limit"):
        inspect(dataset, limit=0)


def test_flat_files_without_targets(tmp_path):
    dataset = open_dataset([make_system(i, 4, energy=None) for i in range(3)])
    result = convert(dataset, tmp_path / "a.safetensors")
    found = inspect(open_dataset(result.output))
    assert found["energy"] is None
    assert found["missing"] == {"y_relaxed": 3}
    assert "no targets" in render(found)
    assert "flat file" in render(found)


def test_many_messages_are_cut(tmp_path):
    records = [{**make_record(i % 2), "y_relaxed": 99.0 + i} for i in range(30)]
    dataset = open_dataset(write_records(tmp_path / "a.lmdb", records))
    with pytest.warns(UserWarning, match=r"30 of 30 structures \("):
        text = render(inspect(dataset))
    assert "energies beyond ±10 eV: 30" in text
    assert "… and 10 more" in text
