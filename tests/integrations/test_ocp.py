"""Our models in fairchem-core: on batches as it makes them, and where it is installed in it."""

import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("torch_geometric.data")
from torch_geometric.data import Batch, Data

import flt_mol
from flt_mol.files import shipped_folder
from flt_mol.models import named_config
from flt_mol.models.checkpoint import load_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing fairchem-core comes to
    from flt_mol.integrations.ocp import FLT, structures_of

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ("atomic_numbers", "positions", "cell", "pbc", "tags", "fixed", "ptr")
PART = range(16)
REST = range(16, 24)


def systems(name="emt_adsorption", rows=PART, **options):
    data = flt_mol.open_dataset(shipped_folder("datasets") / name / "val_id.lmdb", **options)
    return [data[row] for row in rows]


def record(system):
    """As a record of OC20: PyG's Data, numbers as floats."""
    return Data(
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


def batch_of(some):
    return Batch.from_data_list([record(system) for system in some])


def written(path, some):
    """An LMDB file as OC20's."""
    environment = lmdb.open(str(path), subdir=False, map_size=2**28)
    with environment.begin(write=True) as transaction:
        for key, system in enumerate(some):
            transaction.put(str(key).encode(), pickle.dumps(record(system)))
    environment.close()
    return path


def small(**settings):
    return FLT(embed_dim=16, num_heads=2, num_layers=2, ffn_dim=16, num_features=8, **settings)


def equal(batch, wanted):
    found = structures_of(batch)
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.sid == wanted.sid


def predicts(batch, wanted):
    """With its own units and with theirs."""
    scales = {"energy": {"mean": -1.5, "stdev": 2.3}}
    plain, scaled = (FLT(checkpoint="flt-small", normalizer=given) for given in ({}, scales))
    with torch.no_grad():
        for energies in (plain(batch)["energy"], scaled(batch)["energy"] * 2.3 - 1.5):
            assert energies.shape == (len(wanted),)
            np.testing.assert_allclose(energies.double().numpy(), wanted, rtol=0, atol=1e-5)


def test_a_batch_holds_its_systems():
    some = systems()
    equal(batch_of(some), flt_mol.Structures.cat(some))


def test_shipped_models_predict_the_same_energies():
    some = systems()
    predicts(batch_of(some), flt_mol.predict(flt_mol.Structures.cat(some), "flt-small"))


@pytest.mark.filterwarnings("ignore:.*structures:UserWarning")
@pytest.mark.parametrize("genuine", [False, True])
def test_their_class_of_files_gives_the_same(genuine, tmp_path, request):
    pytest.importorskip("fairchem.core", reason="fairchem-core or torch-scatter is not installed")
    from fairchem.core.datasets.lmdb_dataset import LmdbDataset, data_list_collater

    file = tmp_path / "data.lmdb"
    if genuine:
        folder = request.getfixturevalue("oc20_data")
        shutil.copy(folder / "is2re_val_20" / "data.lmdb", file)
    else:
        written(file, systems())
    data = LmdbDataset({"src": str(file)})
    batch = data_list_collater([data[row] for row in range(len(data))], otf_graph=True)
    same = flt_mol.open_dataset(shutil.copy(file, tmp_path / "copy.lmdb"))
    equal(batch, same.batch(range(len(same))))
    predicts(batch, flt_mol.predict(same, "flt-small"))


@pytest.mark.parametrize("shape", [(-1,), (-1, 3)])
def test_fields_that_are_there_are_taken(shape):
    batch = batch_of(systems(rows=range(2)))
    batch.pbc = torch.tensor([[True, True, False], [False, True, True]]).reshape(shape)
    batch.sid = ["one", "two"]
    del batch.tags, batch.fixed
    found = structures_of(batch)
    assert found.pbc.tolist() == [[True, True, False], [False, True, True]]
    assert found.sid == ("one", "two")
    assert not found.tags.any()
    assert not found.fixed.any()


def test_a_new_model_gives_its_bare_output_in_their_units():
    batch = batch_of(systems(rows=range(4)))
    torch.manual_seed(0)
    plain = small()
    torch.manual_seed(0)
    scaled = small(normalizer={"energy": {"mean": 0.25, "rmsd": 2.0}})
    torch.testing.assert_close(scaled(batch)["energy"], plain(batch)["energy"])
    energies = scaled.model(structures_of(batch))["energy"]
    torch.testing.assert_close(energies, 0.25 + 2 * plain(batch)["energy"])


def test_forces_are_in_their_units_where_the_model_gives_them():
    batch = batch_of(systems(rows=range(2)))
    model = FLT(checkpoint="emt-forces", normalizer={"forces": {"mean": 0, "stdev": 2.0}})
    with torch.no_grad():
        found = model(batch)
    wanted = load_model("emt-forces")(structures_of(batch))
    torch.testing.assert_close(2 * found["forces"], wanted["forces"])
    torch.testing.assert_close(found["energy"], wanted["energy"])
    assert set(small(outputs=["energy", "forces"])(batch)) == {"energy", "forces"}


@pytest.mark.parametrize(
    "given", [{"config": "flt-small"}, {"checkpoint": "flt-small", "normalizer": {}}]
)
def test_all_that_is_trained_gets_a_gradient(given):
    """Else their processes, even a single one, stop in the second step."""
    model = FLT(**given)
    model(batch_of(systems(rows=range(2))))["energy"].sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_elements_are_seen_in_training_alone():
    some = systems(rows=range(2))
    model = small()
    model.eval()(batch_of(some))
    assert not model.model.elements_seen.any()
    model.train()(batch_of(some))
    numbers = flt_mol.Structures.cat(some).atomic_numbers.unique()
    assert torch.equal(model.model.elements_seen.nonzero()[:, 0], numbers)


def test_settings_override_those_of_a_named_model():
    config = FLT(config="flt-small", pairs={"cutoff": 4.5}, dropout=0.25).model.config
    wanted = named_config("flt-small")
    pairs = wanted.pairs.model_copy(update={"cutoff": 4.5})
    changes = {"pairs": pairs, "dropout": 0.25, "outputs": ["energy"]}
    assert config == wanted.model_copy(update=changes)
    assert FLT(config="emt-forces").model.config.outputs == ["energy", "forces"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"config": "flt-smal"}, "flt-small"),
        ({"cutof": 5.0}, "cutof"),
        ({"config": "flt-small", "dropuot": 0.1}, "dropout"),
        ({"checkpoint": "flt-small", "dropout": 0.1}, "dropout"),
        ({"checkpoint": "flt-small", "config": "flt-small"}, "config"),
        ({"checkpoint": "nowhere", "normalizer": {}}, "nowhere"),
        ({"checkpoint": "flt-small"}, "model.normalizer"),
        ({"normalizer": {"energy": {"file": "a.pt"}}}, "normalizer.energy"),
        ({"normalizer": {"energy": {"mean": 0.0, "stdev": 0.0}}}, "stdev"),
        ({"normalizer": {"target": {"mean": 0.0, "stdev": 1.0}}}, "normalizer.target"),
    ],
)
def test_wrong_settings_are_named(given, named):
    with pytest.raises(ValueError, match=named):
        FLT(**given)


def test_importing_it_registers_the_model():
    reason = "fairchem-core or torch-scatter is not installed"
    registry = pytest.importorskip("fairchem.core.common.registry", reason=reason).registry
    for name in ("flt", "flt_mol.integrations.ocp.FLT"):
        assert registry.get_model_class(name) is FLT


def fairchem(folder, mode, config, *arguments):
    """Their command in a process of its own; what it logs."""
    pytest.importorskip("fairchem.core", reason="fairchem-core or torch-scatter is not installed")
    file = folder / "run.yml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    command = [sys.executable, "-m", "fairchem.core._cli", "--mode", mode, "--config-yml", file]
    command += ["--cpu", "--print-every", "1", "--run-dir", folder, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def page_config(train, val, **model):
    """The yaml of the page with other files and settings of the model, for ten steps."""
    page = ROOT / "docs" / "oc20.md"
    if not page.is_file():
        pytest.skip("needs the checkout")
    config = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[1])
    config["dataset"]["train"]["src"], config["dataset"]["val"]["src"] = str(train), str(val)
    config["optim"] |= {"batch_size": len(PART), "num_workers": 0, "max_epochs": 10}
    config["model"] |= model
    return config


def losses(log):
    return [float(x) for x in re.findall(r"loss: ([\d.e+-]+), lr", log)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:elements never:UserWarning")
def test_their_trainer_trains_ten_steps_and_predicts(tmp_path):
    train = written(tmp_path / "train.lmdb", systems())
    test = written(tmp_path / "test.lmdb", systems(rows=REST))
    val = shutil.copy(test, tmp_path / "val.lmdb")  # a file is opened once in a process
    config = page_config(train, val, seed=1)
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
    assert len(theirs) == len(ours) == len(REST)
    for row, energy in enumerate(ours):
        assert theirs[str(data[row].sid[0])] == pytest.approx(energy, abs=1e-5)


@pytest.mark.slow
def test_their_trainer_trains_forces(tmp_path):
    train, val = (
        written(tmp_path / name, systems("emt_relaxations", rows, forces=True))
        for name, rows in (("train.lmdb", PART), ("val.lmdb", REST))
    )
    config = page_config(train, val, config="emt-forces", outputs=["energy", "forces"])
    config["dataset"]["train"]["key_mapping"] = {"y_relaxed": "energy", "force": "forces"}
    free = {"level": "atom", "train_on_free_atoms": True, "eval_on_free_atoms": True}
    config["outputs"]["forces"] = free
    config["loss_functions"].append({"forces": {"fn": "l2mae", "coefficient": 10}})
    config["evaluation_metrics"]["metrics"]["forces"] = ["mae"]
    found = losses(fairchem(tmp_path, "train", config))
    assert len(found) == 10
    assert found[-1] < 0.8 * found[0]
