"""Our models in fairchem-core: needs it and torch-scatter (docs/ocp.md), else all is skipped."""

import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("fairchem.core", reason="fairchem-core 1.10 or torch-scatter is not installed")
from fairchem.core.common.registry import registry
from fairchem.core.datasets.lmdb_dataset import LmdbDataset, data_list_collater
from torch_geometric.data import Data

import flt_mol
from flt_mol.files import shipped_folder
from flt_mol.integrations.ocp import FLT, structures_of
from flt_mol.models.checkpoint import load_model

ROOT = Path(__file__).resolve().parents[2]
EMT = shipped_folder("datasets") / "emt_adsorption" / "val_id.lmdb"
FRAMES = shipped_folder("datasets") / "emt_relaxations" / "val_id.lmdb"
FIELDS = ("atomic_numbers", "positions", "cell", "pbc", "tags", "fixed", "ptr")


def written(source, path, rows=range(16), **options):
    """An LMDB file as OC20's of some systems of ours: PyG's Data, numbers as floats."""
    data = flt_mol.open_dataset(source, **options)
    environment = lmdb.open(str(path), subdir=False, map_size=2**28)
    with environment.begin(write=True) as transaction:
        for key, row in enumerate(rows):
            system = data[row]
            record = Data(
                pos=system.positions,
                cell=system.cell,
                atomic_numbers=system.atomic_numbers.float(),
                natoms=system.num_atoms,
                tags=system.tags,
                fixed=system.fixed.float(),
                sid=system.sid[0],
                y_relaxed=float(system.energy[0]),
                force=system.forces,
            )
            transaction.put(str(key).encode(), pickle.dumps(record))
    environment.close()
    return path


@pytest.fixture(scope="module")
def emt(tmp_path_factory):
    return written(EMT, tmp_path_factory.mktemp("emt") / "data.lmdb")


@pytest.fixture(params=["emt", "oc20"])
def file(request):
    if request.param == "emt":
        return request.getfixturevalue("emt")
    return request.getfixturevalue("oc20_data") / "is2re_val_20" / "data.lmdb"


def batch_of(path, count=12):
    """As their loaders make it, of their data set."""
    data = LmdbDataset({"src": str(path)})
    return data_list_collater([data[row] for row in range(count)], otf_graph=True)


def small(**settings):
    return FLT(embed_dim=16, num_heads=2, num_layers=2, ffn_dim=16, num_features=8, **settings)


def test_importing_it_registers_the_model():
    assert registry.get_model_class("flt") is FLT
    assert registry.get_model_class("flt_mol.integrations.ocp.FLT") is FLT


def test_a_batch_holds_the_systems_of_the_file(file):
    found = structures_of(batch_of(file))
    wanted = flt_mol.open_dataset(file).batch(range(12))
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.sid == wanted.sid


@pytest.mark.parametrize("shape", [(-1,), (-1, 3)])
def test_pbc_and_names_are_taken_where_there_are_some(emt, shape):
    batch = batch_of(emt, 2)
    batch.pbc = torch.tensor([[True, True, False], [False, True, True]]).reshape(shape)
    batch.sid = ["one", "two"]
    del batch.tags, batch.fixed
    found = structures_of(batch)
    assert found.pbc.tolist() == [[True, True, False], [False, True, True]]
    assert found.sid == ("one", "two")
    assert not found.tags.any()
    assert not found.fixed.any()


@pytest.mark.filterwarnings("ignore:.*structures:UserWarning")
def test_shipped_models_predict_the_same_energies(file):
    batch = batch_of(file)
    scales = {"energy": {"mean": -1.5, "stdev": 2.3}}
    wanted = torch.from_numpy(flt_mol.predict(flt_mol.open_dataset(file), "flt-small")[:12])
    plain, scaled = FLT(checkpoint="flt-small"), FLT(checkpoint="flt-small", normalizer=scales)
    with torch.no_grad():
        energies = plain(batch)["energy"]
        torch.testing.assert_close(energies.double(), wanted, rtol=0, atol=1e-5)
        restored = scaled(batch)["energy"] * 2.3 - 1.5
    torch.testing.assert_close(restored.double(), wanted, rtol=0, atol=1e-5)


def test_a_new_model_gives_its_bare_output_in_their_units(emt):
    batch = batch_of(emt, 4)
    torch.manual_seed(0)
    plain = small()
    torch.manual_seed(0)
    scaled = small(normalizer={"energy": {"mean": 0.25, "rmsd": 2.0}})
    torch.testing.assert_close(scaled(batch)["energy"], plain(batch)["energy"])
    energies = scaled.model(structures_of(batch))["energy"]
    torch.testing.assert_close(energies, 0.25 + 2 * plain(batch)["energy"])


def test_forces_are_in_their_units_where_the_model_gives_them(emt):
    batch = batch_of(emt, 2)
    model = FLT(checkpoint="emt-forces", normalizer={"forces": {"mean": 0, "stdev": 2.0}})
    with torch.no_grad():
        found = model(batch)
    wanted = load_model("emt-forces")(structures_of(batch))
    torch.testing.assert_close(2 * found["forces"], wanted["forces"])
    torch.testing.assert_close(found["energy"], wanted["energy"])
    assert set(small(outputs=["energy", "forces"])(batch)) == {"energy", "forces"}


@pytest.mark.parametrize("given", [{"config": "flt-small"}, {"checkpoint": "flt-small"}])
def test_all_that_is_trained_gets_a_gradient(emt, given):
    """Else their processes, even a single one, stop in the second step."""
    model = FLT(**given)
    model(batch_of(emt, 2))["energy"].sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_settings_override_those_of_a_named_model():
    config = FLT(config="flt-small", pairs={"cutoff": 4.5}, dropout=0.25).model.config
    assert (config.pairs.cutoff, config.dropout, config.embed_dim) == (4.5, 0.25, 64)
    assert config.outputs == ["energy"]
    assert FLT(config="emt-forces").model.config.outputs == ["energy", "forces"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"config": "flt-smal"}, "flt-small"),
        ({"cutof": 5.0}, "cutof"),
        ({"config": "flt-small", "dropuot": 0.1}, "dropout"),
        ({"checkpoint": "flt-small", "dropout": 0.1}, "dropout"),
        ({"checkpoint": "flt-small", "config": "flt-small"}, "config"),
        ({"checkpoint": "nowhere"}, "nowhere"),
        ({"normalizer": {"energy": {"file": "a.pt"}}}, "normalizer.energy"),
        ({"normalizer": {"energy": {"mean": 0.0, "stdev": 0.0}}}, "stdev"),
        ({"normalizer": {"target": {"mean": 0.0, "stdev": 1.0}}}, "normalizer.target"),
    ],
)
def test_wrong_settings_are_named(given, named):
    with pytest.raises(ValueError, match=named):
        FLT(**given)


def fairchem(folder, mode, config, *arguments):
    """Their command in a process of its own; what it logs."""
    file = folder / "run.yml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    command = [sys.executable, "-m", "fairchem.core._cli", "--mode", mode, "--config-yml", file]
    options = ["--cpu", "--print-every", "1", "--run-dir", folder, *arguments]
    done = subprocess.run(
        [*map(str, command + options)], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def page_config(train, val, epochs, **model):
    """The yaml of the page with other files and a small model."""
    page = ROOT / "docs" / "ocp.md"
    if not page.is_file():
        pytest.skip("needs the checkout")
    config = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[1])
    config["dataset"]["train"]["src"], config["dataset"]["val"]["src"] = str(train), str(val)
    config["optim"] |= {"batch_size": 16, "num_workers": 0, "max_epochs": epochs}
    config["model"] |= model
    return config


def losses(log):
    return [float(x) for x in re.findall(r"loss: ([\d.e+-]+), lr", log)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:elements never:UserWarning")
def test_their_trainer_trains_ten_steps_and_predicts(emt, tmp_path):
    test = written(EMT, tmp_path / "test.lmdb", range(16, 24))
    val = shutil.copy(test, tmp_path / "val.lmdb")  # a file is opened once in a process
    config = page_config(emt, val, epochs=10, seed=1)
    found = losses(fairchem(tmp_path, "train", config))
    assert len(found) == 10
    assert found[-1] < 0.5 * found[0]
    (best,) = tmp_path.glob("checkpoints/*/best_checkpoint.pt")
    config["dataset"]["test"] = {"src": str(test)}
    fairchem(tmp_path, "predict", config, "--checkpoint", best)
    (results,) = tmp_path.glob("results/*/*predictions.npz")
    saved = np.load(results)
    theirs = dict(zip(saved["ids"].tolist(), saved["energy"].ravel().tolist(), strict=True))
    data = flt_mol.open_dataset(test)
    ours = flt_mol.predict(data, best)
    assert len(theirs) == len(ours) == 8
    for row, energy in enumerate(ours):
        assert theirs[str(data[row].sid[0])] == pytest.approx(energy, abs=1e-5)


@pytest.mark.slow
def test_their_trainer_trains_forces(tmp_path):
    train = written(FRAMES, tmp_path / "train.lmdb", forces=True)
    val = written(FRAMES, tmp_path / "val.lmdb", range(16, 24), forces=True)
    outputs = ["energy", "forces"]
    config = page_config(train, val, epochs=10, config="emt-forces", outputs=outputs)
    config["dataset"]["train"]["key_mapping"] = {"y_relaxed": "energy", "force": "forces"}
    free = {"level": "atom", "train_on_free_atoms": True, "eval_on_free_atoms": True}
    config["outputs"]["forces"] = free
    config["loss_functions"].append({"forces": {"fn": "l2mae", "coefficient": 10}})
    config["evaluation_metrics"]["metrics"]["forces"] = ["mae"]
    found = losses(fairchem(tmp_path, "train", config))
    assert len(found) == 10
    assert found[-1] < 0.8 * found[0]
