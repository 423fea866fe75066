"""Making the data set: workers, interruptions, files, card."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml

from flt_mol.data import open_dataset
from flt_mol.data.emt import dataset, plan, run, tables

# slabs of seed 0 with 8 or 12 metal atoms, in two splits
SMALL_SLABS = [
    i
    for i in [*range(40), *range(300_000, 300_020)]
    if len(plan.draw_slab(plan.split_of(i), plan.generator(0, i, 0)).symbols) <= 9
][:4]


SETTINGS = {
    name: getattr(plan, name) for name in ("TRAINED_ADSORBATES", "HELD_OUT_ADSORBATES", "TRIES")
}
QUICK = {"TRAINED_ADSORBATES": ("H", "O"), "HELD_OUT_ADSORBATES": ("N",), "TRIES": 2}


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Few adsorbates that cannot dissociate, in this process only: workers are spawned."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK.items():
            patch.setattr(plan, name, value)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    dataset.generate(folder / "set", num_slabs=6, workers=1, work=folder / "work", progress=False)
    return folder


def contents(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def digests(folder):
    metadata = yaml.safe_load((folder / "dataset.yaml").read_text(encoding="utf-8"))
    return {split: about["sha256_of_content"] for split, about in metadata["splits"].items()}


def test_workers_do_not_matter(tmp_path, monkeypatch):
    for name, value in SETTINGS.items():  # those of the workers
        monkeypatch.setattr(plan, name, value)
    slabs = SMALL_SLABS[:2]
    one = run.run_slabs(tmp_path / "1", slabs, seed=0, workers=1, progress=False)
    two = run.run_slabs(tmp_path / "2", slabs[::-1], seed=0, workers=2, progress=False)
    assert one == two[::-1]
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert sum(len(chunk["records"]) for chunk in one) >= 4


def test_a_killed_run_goes_on(tmp_path):
    work = tmp_path / "killed"
    code = (
        "from pathlib import Path; from flt_mol.data.emt import plan, run\n"
        f"vars(plan).update({QUICK!r})\n"
        f"run.run_slabs(Path({str(work)!r}), {SMALL_SLABS}, seed=0, workers=1, progress=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not list(work.glob("slab-*.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in work.glob("slab-*.json")}
    assert 0 < len(done) < len(SMALL_SLABS)
    resumed = run.run_slabs(work, SMALL_SLABS, seed=0, workers=1, progress=False)
    whole = run.run_slabs(tmp_path / "whole", SMALL_SLABS, seed=0, workers=1, progress=False)
    assert resumed == whole
    assert {name: (work / name).stat().st_mtime_ns for name in done} == done


def test_lost_and_torn_parts_are_made_again(made, tmp_path):
    before = digests(made / "set")
    parts = sorted((made / "work").glob("slab-*.json"))
    text = parts[0].read_text(encoding="utf-8")
    parts[0].write_text(text[: len(text) // 2], encoding="utf-8")
    parts[-1].unlink()
    dataset.generate(tmp_path / "set", num_slabs=6, workers=1, work=made / "work", progress=False)
    assert digests(tmp_path / "set") == before
    assert parts[0].read_text(encoding="utf-8") == text


def test_another_seed_in_the_same_work_folder_is_refused(made):
    with pytest.raises(ValueError, match=r"plan\.json.*seed = 0, now it is 1"):
        run.run_slabs(made / "work", [0], seed=1, workers=1, progress=False)


def test_other_seeds_give_other_slabs():
    draws = [plan.draw_slab("train", plan.generator(seed, 0, 0)) for seed in range(5)]
    assert len(set(draws)) == 5


def test_too_few_slabs_for_a_system_in_each_split(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "TRIES", 0)
    with pytest.raises(ValueError, match="no system in train.*num_slabs = 5"):
        dataset.generate(tmp_path, num_slabs=5, workers=1, progress=False)


def test_workers_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="workers is 0"):
        dataset.generate(tmp_path, workers=0, progress=False)


def test_global_state_stays(made, tmp_path):
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    threads, environment = torch.get_num_threads(), dict(os.environ)
    run.run_slabs(tmp_path, SMALL_SLABS[:1], seed=0, workers=1, progress=False)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert (torch.get_num_threads(), dict(os.environ)) == (threads, environment)


def test_work_folder_is_removed_if_it_was_not_asked_for(made, tmp_path):
    shutil.copytree(made / "work", tmp_path / "set" / "work")
    dataset.generate(tmp_path / "set", num_slabs=6, workers=1, progress=False)
    names = {path.name for path in (tmp_path / "set").iterdir()}
    assert names == {"README.md", "dataset.yaml", *(f"{s}.lmdb" for s in plan.SPLITS)}
    assert digests(tmp_path / "set") == digests(made / "set")


def test_files_are_read_like_oc20(made):
    for split in plan.SPLITS:
        dataset = open_dataset(made / "set" / f"{split}.lmdb", require_energy=True)
        for i in range(len(dataset)):
            system = dataset[i]
            assert torch.equal(system.fixed, system.tags == 0)
            assert bool(system.pbc.all())
            assert int(system.sid[0]) // 10 == system.info["slab"][0]
            assert plan.split_of(system.info["slab"][0]) == split


def test_lmdb_keeps_every_value(tmp_path):
    rng = np.random.default_rng(0)
    system = {
        "pos": rng.normal(size=(3, 3)).astype(np.float32).tolist(),
        "pos_relaxed": rng.normal(size=(3, 3)).astype(np.float32).tolist(),
        "cell": (10 * np.eye(3)).tolist(),
        "pbc": [True, True, True],
        "atomic_numbers": [29, 29, 8],
        "tags": [0, 1, 2],
        "fixed": [1, 0, 0],
        "sid": 70,
        "natoms": 3,
        "y_init": 0.123456789012345,
        "y_relaxed": -1.987654321098765,
        "adsorbate": "O",
        "facet": "111",
        "slab": 7,
    }
    records = [dataset.to_record({**system, "sid": i}) for i in range(23)]
    dataset.write_lmdb(tmp_path / "x.lmdb", records)
    assert [path.name for path in tmp_path.iterdir()] == ["x.lmdb"]
    found = open_dataset(tmp_path / "x.lmdb", require_energy=True)
    assert [found[i].sid[0] for i in range(len(found))] == list(range(23))
    read = found[11]
    assert read.positions.tolist() == system["pos"]
    assert read.positions_relaxed.tolist() == system["pos_relaxed"]
    assert read.energy.tolist() == [system["y_relaxed"]]
    assert read.energy_initial.tolist() == [system["y_init"]]
    assert read.fixed.tolist() == [True, False, False]


def test_card_keeps_text_around_the_tables(made):
    card = made / "set" / "README.md"
    text = card.read_text(encoding="utf-8")
    assert text.count(tables.BEGIN) == text.count(tables.END) == 1
    card.write_text(f"# Mine\n\nAbove.\n{text.replace('val_id', 'x')}\nBelow.\n", encoding="utf-8")
    dataset.generate(made / "set", num_slabs=6, workers=1, work=made / "work", progress=False)
    written = card.read_text(encoding="utf-8")
    assert written.startswith("# Mine\n\nAbove.\n")
    assert written.endswith("\nBelow.\n")
    assert "| val_id |" in written


def test_metadata_counts_add_up(made):
    metadata = yaml.safe_load((made / "set" / "dataset.yaml").read_text(encoding="utf-8"))
    filters = metadata["filters"]
    dropped = sum(about["count"] for about in filters["dropped"].values())
    kept = sum(about["count"] for about in metadata["splits"].values())
    assert filters["placements_tried"] == filters["kept"] + dropped
    assert filters["kept"] == kept
    for about in metadata["splits"].values():
        content = (made / "set" / about["file"]).read_bytes()
        assert about["sha256"] == hashlib.sha256(content).hexdigest()
        assert about["bytes"] == len(content)
