import numpy as np
import pytest

from flt_mol.data.catalog import recipe
from flt_mol.evaluation.energy_tables import table_of
from flt_mol.evaluation.submission import (
    SPLITS,
    TEST_COUNTS,
    check_submission,
    write_submission,
)

IDS = {split: [f"{k}{i}" for i in range(3)] for k, split in enumerate(SPLITS, start=1)}
COUNTS = dict.fromkeys(SPLITS, 3)


def arrays(**changes):
    sound = {}
    for split, sids in IDS.items():
        sound[f"{split}_ids"] = np.array(sids)
        sound[f"{split}_energy"] = np.arange(3) - 1.5
    return {k: v for k, v in {**sound, **changes}.items() if v is not None}


def saved(path, content):
    np.savez_compressed(path, **content)
    return path


def tables(path, **changes):
    made = {}
    for split, sids in IDS.items():
        rows = changes.get(split, [(sid, float(i)) for i, sid in enumerate(sids)])
        lines = ({"sid": sid, "energy": e} for sid, e in rows)
        made[split] = table_of(path / f"{split}.csv", enumerate(lines, start=2))
    return made


def test_counts_are_those_of_the_data_set():
    splits = recipe("oc20_is2re").metadata["splits"]
    assert {split: splits[f"test_{split}"]["count"] for split in SPLITS} == TEST_COUNTS


def test_made_as_the_leaderboard_wants_it(tmp_path):
    path = write_submission(tables(tmp_path), tmp_path / "s.npz", counts=COUNTS)
    with np.load(path, allow_pickle=False) as file:
        assert sorted(file.files) == sorted(arrays())
        assert file["ood_ads_ids"].tolist() == ["20", "21", "22"]
        assert file["ood_ads_ids"].dtype.kind == "U"
        assert file["ood_ads_energy"].dtype == np.float64
        assert file["ood_ads_energy"].tolist() == [0.0, 1.0, 2.0]
    assert check_submission(path, counts=COUNTS) == COUNTS
    assert check_submission(path, expected=IDS) == COUNTS
    again = write_submission(tables(tmp_path), tmp_path / "t.npz", expected=IDS)
    assert again.read_bytes() == path.read_bytes()


def test_repetitions_of_padded_processes_are_dropped(tmp_path):
    made = tables(tmp_path, id=[("10", 1.0), ("11", 2.0), ("12", 3.0), ("10", 1.0)])
    assert made["id"].repeated == 1
    path = write_submission(made, tmp_path / "s.npz", counts=COUNTS)
    assert check_submission(path, counts=COUNTS)["id"] == 3
    with pytest.raises(ValueError, match=r"id\.csv, line 5, sid 10: .*1\.5, and 1\.0 in line 2"):
        tables(tmp_path, id=[("10", 1.0), ("11", 2.0), ("12", 3.0), ("10", 1.5)])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ood_cat_ids": None}, "lack ood_cat_ids"),
        ({"note": np.zeros(1)}, "hold note, which do not belong"),
        ({"id_ids": np.array([10, 11, 12])}, "id_ids holds whole numbers, expected text"),
        ({"id_ids": np.array([b"1", b"2", b"3"])}, "id_ids holds bytes"),
        ({"id_energy": np.array([1, 2, 3])}, "id_energy holds whole numbers, expected real"),
        ({"id_energy": np.array(["1", "2", "3"])}, "id_energy holds text"),
        ({"id_energy": np.ones(3) * 1j}, "id_energy holds complex numbers"),
        ({"id_energy": np.array([True] * 3)}, "id_energy holds booleans"),
        ({"id_energy": np.ones((3, 1))}, r"id_energy has shape \(3, 1\)"),
        ({"id_energy": np.ones(2)}, "id_ids has 3 entries, id_energy 2"),
        ({"id_energy": np.array([1, np.nan, np.inf])}, "not finite for sid 11, 12"),
        ({"id_ids": np.array(["10", "12", "12"])}, "repeats sid 12 with different energies"),
        ({"id_ids": np.array(["10", " ", "12"])}, "the id in row 1 is empty"),
        ({"id_ids": np.array(["10", "11"]), "id_energy": np.ones(2)}, "id lacks sid 12"),
        ({"id_ids": np.array(["10", "11", "99"])}, "lacks sid 12 and has sid 99, not of this"),
        (
            {"id_ids": np.array(["10", "11", "12", "99"]), "id_energy": np.ones(4)},
            "id has sid 99, not of this split",
        ),
        ({"id_ids": np.array(["10", "11", {}], dtype=object)}, "array id_ids cannot be read.*pick"),
    ],
)
def test_refusals_name_array_and_id(tmp_path, changes, match):
    path = saved(tmp_path / "s.npz", arrays(**changes))
    with pytest.raises(ValueError, match=match):
        check_submission(path, expected=IDS)


def test_equal_repetitions_are_refused_with_the_mend(tmp_path):
    content = arrays(
        id_ids=np.array(["10", "11", "12", "11"]), id_energy=np.array([0, 1.0, 2.0, 1.0])
    )
    with pytest.raises(ValueError, match=r"repeats sid 11 with the same energy: .*drops"):
        check_submission(saved(tmp_path / "s.npz", content), counts=COUNTS)


def test_incomplete_splits_without_known_ids(tmp_path):
    path = saved(tmp_path / "s.npz", arrays())
    with pytest.raises(ValueError, match=r"id has 3 systems \(sid 10, 11, …\), .* has 24948"):
        check_submission(path)
    with pytest.raises(ValueError, match="has 24948"):
        write_submission(tables(tmp_path), tmp_path / "t.npz")
    assert not (tmp_path / "t.npz").exists()
    assert check_submission(path, counts=None) == COUNTS


def test_making_refuses(tmp_path):
    with pytest.raises(ValueError, match="lack ood_both"):
        write_submission({"id": 0, "ood_ads": 0, "ood_cat": 0}, tmp_path / "t.npz")
    with pytest.raises(ValueError, match=r"ending in \.npz"):
        write_submission(tables(tmp_path), tmp_path / "t.zip", counts=COUNTS)
    made = tables(tmp_path, id=[("10", 0.0), ("11", 0.0), ("13", 0.0)])
    with pytest.raises(ValueError, match="lacks sid 12 and has sid 13"):
        write_submission(made, tmp_path / "t.npz", expected=IDS)
    mixed = tables(tmp_path)
    mixed["id"].energies = {("a", "10"): 0.0, ("b", "10"): 0.0}
    with pytest.raises(ValueError, match="sid 10 is in a and in b"):
        write_submission(mixed, tmp_path / "t.npz", counts=COUNTS)


def test_files_that_are_none(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "b.npz").write_bytes(b"PK\x05\x06")
    whole = saved(tmp_path / "c.npz", arrays()).read_bytes()
    (tmp_path / "d.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("a.npy", "b.npz", "d.npz"):
        with pytest.raises(ValueError, match=f"{name} is no .npz file"):
            check_submission(tmp_path / name)
    with pytest.raises(ValueError, match="does not exist"):
        check_submission(tmp_path / "none.npz")


@pytest.mark.parametrize("place", range(5, 1300, 61))
def test_damage_is_found_or_does_no_harm(tmp_path, place):
    damaged = bytearray(saved(tmp_path / "s.npz", arrays()).read_bytes())
    damaged[place % len(damaged)] ^= 0xFF
    (tmp_path / "s.npz").write_bytes(damaged)
    try:
        said = str(check_submission(tmp_path / "s.npz", expected=IDS))
    except ValueError as error:
        said = str(error)
    assert said == str(COUNTS) or "s.npz" in said
