"""Checkpoints: written, found, read, refused, exported."""

import copy
import json
import os
import shutil

import pytest
import torch
import yaml
from conftest import KINDS, small_model

from flt_mol.models.checkpoint import (
    checkpoint_config,
    find_checkpoint,
    find_device,
    load_model,
    misfits,
    read_checkpoint,
    save_checkpoint,
)
from flt_mol.models.energy import CONFIG_KEY
from flt_mol.models.export import export_checkpoint, export_model
from helpers import invariances as testing


@pytest.fixture(scope="module")
def structures():
    return testing.random_structures(torch.Generator().manual_seed(1), natoms=(5, 7))


@pytest.fixture
def model():
    model = small_model(**KINDS["rpe, both filters"], redraw_every=3).eval()
    model.normalizer.fit(torch.tensor([-3.0, 1.0]))
    model.mark_seen([1, 8])
    model.trained_on = {"systems": 2, "energy_median": -1.0, "most_atoms": 9}
    return model


@pytest.fixture
def saved(model, tmp_path):
    systems = {"trained": ["a", "b"], "held_out": []}
    config = {
        "name": "x",
        "model": model.config.model_dump(),
        "data": {"name": "/a/b", "paths": {}},
    }
    return save_checkpoint(tmp_path / "run" / "best.ckpt", model, config, {"val/mae": 0.1}, systems)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def energy(model, structures):
    with torch.no_grad():
        return model(structures)["energy"]


def test_all_of_a_model_travels(saved, model, structures):
    state = torch.get_rng_state()
    again = load_model(saved.parent)
    assert torch.equal(torch.get_rng_state(), state)
    assert not again.training
    assert again.config == model.config == checkpoint_config(saved)
    assert again.trained_on == model.trained_on
    assert torch.equal(again.elements_seen, model.elements_seen)
    assert torch.equal(energy(again, structures), energy(model, structures))
    content = torch.load(saved, weights_only=True)
    assert content["format_version"] == 2
    assert content["elements_seen"] == [1, 8]
    assert read_checkpoint(saved)["systems"] == {"trained": ["a", "b"], "held_out": []}
    assert os.listdir(saved.parent) == ["best.ckpt"]


def wrap(prefix):
    return lambda weights: {f"{prefix}{key}": value for key, value in weights.items()}


WRAPPERS = {
    "bare": lambda weights: weights,
    **{p: wrap(p) for p in ("module.", "module.module.", "_orig_mod.", "model.", "net.energy.")},
    "compiled blocks": lambda weights: {
        key.replace("encoder.", "encoder._orig_mod."): value for key, value in weights.items()
    },
    "state_dict": lambda weights: {"state_dict": wrap("model.module.")(weights), "epoch": 3},
    "model": lambda weights: {"model": weights},
    "ema": lambda weights: {
        "state_dict": {
            key: value * 0 if value.is_floating_point() else value for key, value in weights.items()
        },
        "ema_state_dict": wrap("module.")(weights),
    },
    "float64": lambda weights: {
        key: value.double() if value.is_floating_point() else value
        for key, value in weights.items()
    },
}


@pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_wrappers_are_stripped(wrapped, model, structures, tmp_path):
    torch.save(wrapped(weights_of(model)), tmp_path / "a.pt")
    torch.testing.assert_close(
        energy(load_model(tmp_path / "a.pt"), structures), energy(model, structures)
    )


def test_an_average_is_taken(model, structures, tmp_path):
    average = torch.optim.swa_utils.AveragedModel(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    average.update_parameters(other)
    path = save_checkpoint(tmp_path / "b.ckpt", average.module, {})
    torch.save(average.state_dict(), tmp_path / "a.pt")
    for file in (path, tmp_path / "a.pt"):
        found = load_model(file)
        assert torch.equal(energy(found, structures), energy(average.module, structures))
    torch.save({**wrap("a.")(model.state_dict()), **wrap("b.")(model.state_dict())}, path)
    with pytest.raises(ValueError, match=r"b\.ckpt.*'a\.', 'b\.'"):
        load_model(path)


def test_weights_that_do_not_fit_are_listed(saved, tmp_path):
    content = torch.load(saved, weights_only=True)
    weights = content["state_dict"]
    weights["old"] = torch.zeros(1)
    weights["head.tag_weight"] = torch.zeros(7)
    weights["elements_seen"] = torch.zeros(119)
    del weights["normalizer.std"]
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt") as caught:
        load_model(tmp_path / "a.pt")
    for name in ("missing: normalizer.std", "old", "head.tag_weight is (7,)", "elements_seen"):
        assert name in str(caught.value)
    assert misfits({"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.complex64)})


def damaged(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


FOREIGN = {
    "cut": lambda data: data[: len(data) // 2],
    "damaged": damaged,
    "empty": lambda data: b"",
    "text": lambda data: b"hello",
    "git-lfs": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    "web page": lambda data: b"<!DOCTYPE html><html></html>",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", ["best.ckpt", "model.safetensors"])
def test_what_is_no_checkpoint_is_named(name, kind, saved, model, tmp_path):
    export_model(model, tmp_path)
    file = saved if kind == "best.ckpt" else tmp_path / kind
    file.write_bytes(FOREIGN[name](file.read_bytes()))
    with pytest.raises(ValueError, match=kind) as caught:
        load_model(file)
    if name == "git-lfs":
        assert name in str(caught.value)


def test_contents_that_are_refused(saved, tmp_path):
    content = torch.load(saved, weights_only=True)
    path, bare = (
        tmp_path / "a.ckpt",
        {k: v for k, v in content["state_dict"].items() if k != CONFIG_KEY},
    )
    config = torch.tensor(list(b'{"embed_dim": 10}'), dtype=torch.uint8)
    for wrong, name in (
        ([1, 2], "list"),
        ({"state_dict": {"a": 3}}, "a"),
        ({"state_dict": bare}, CONFIG_KEY),
        ({"state_dict": {**bare, CONFIG_KEY: config}}, "model.embed_dim is 10"),
        ({"state_dict": {**bare, CONFIG_KEY: torch.tensor([1, 2])}}, "configuration"),
        ({**content, "format_version": 9}, "format 9"),
        ({**content, "format_version": None}, "format None"),
        ({**content, "trained_on": 5}, "int"),
    ):
        torch.save(wrong, path)
        with pytest.raises(ValueError, match=r"a\.ckpt") as caught:
            load_model(path)
        assert name in str(caught.value)
    import argparse

    torch.save({**content, "args": argparse.Namespace(lr=1.0)}, path)
    with pytest.raises(ValueError, match=r"a\.ckpt.*argparse\.Namespace"):
        load_model(path)


def test_where_checkpoints_are_found(saved, tmp_path):
    assert find_checkpoint(saved) == find_checkpoint(saved.parent) == saved
    assert find_checkpoint("emt-small") == find_checkpoint("emt_small")
    for wrong, hint in (
        ("emt_smal", "emt-small"),
        ("flt-base", "flt-small"),
        (tmp_path / "none", "flt-small"),
    ):
        with pytest.raises(ValueError, match="no checkpoint") as caught:
            find_checkpoint(wrong)
        assert hint in str(caught.value)


def test_a_run_without_an_epoch_is_no_checkpoint_yet(tmp_path):
    (tmp_path / "resume.ckpt").touch()
    with pytest.raises(ValueError, match=r"no epoch of the run has ended: give its command again"):
        find_checkpoint(tmp_path)


def test_devices():
    assert find_device("cpu") == torch.device("cpu")
    for wrong in ("cuda:77", "gpus"):
        with pytest.raises(ValueError, match=wrong):
            find_device(wrong)


def test_an_exported_folder_loads_again(saved, model, structures, tmp_path):
    files = export_checkpoint(saved.parent, tmp_path / "out")
    assert [file.name for file in files] == ["model.safetensors", "config.json", "README.md"]
    for place in (tmp_path / "out", files[0], files[1]):
        again = load_model(place)
        assert torch.equal(energy(again, structures), energy(model, structures))
        assert again.trained_on == model.trained_on
    settings = json.loads(files[1].read_text())
    assert settings["model"] == model.config.model_dump()
    assert settings["metrics"] == {"val/mae": 0.1}
    assert settings["normalizer"]["energy"] == {"mean": -1.0, "std": 2.0}
    assert "/a/b" not in files[1].read_text()
    assert "H, O" in files[2].read_text()
    run = {
        "finetune": {"checkpoint": "a/base.ckpt"},
        "data": {"name": "emt_adsorption", "train": "train", "validation": "val_id"},
    }
    found = {"epoch": 3.0, "val/mae": 0.1, "val/ewt": 0.25, "train/loss": 1.0}
    card = export_model(model, tmp_path / "tuned", run, found, "mit")[2].read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert [head[x] for x in ("license", "base_model")] == ["mit", "base.ckpt"]
    assert head["datasets"] == ["emt_adsorption"]
    for line in ("Base model: base.ckpt", "val_id: val/ewt 0.2500, val/mae 0.1000", "pip install"):
        assert line in card
    before = [file.read_bytes() for file in files[:2]]
    files[2].write_text("mine")
    export_checkpoint(saved, tmp_path / "out")
    assert [file.read_bytes() for file in files] == [*before, b"mine"]
    shutil.copy(files[0], tmp_path / "alone.safetensors")
    assert load_model(tmp_path / "alone.safetensors").config == model.config


def test_exports_that_are_refused(model, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json"):
        export_model(model, tmp_path)
    with torch.no_grad():
        model.head.tag_weight[0] = torch.nan
    with pytest.raises(ValueError, match="head.tag_weight"):
        export_model(model, tmp_path / "other")
