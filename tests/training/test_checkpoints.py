import os
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import small_model

from flt_mol import testing
from flt_mol.training.checkpoints import (
    find_checkpoint,
    load_model,
    read_checkpoint,
    save_checkpoint,
)


@pytest.fixture
def model():
    model = small_model()
    model.normalizer.fit(torch.tensor([-2.0, 1.0, 4.0]))
    model.mark_seen([1, 8, 29])
    return model.eval()


@pytest.fixture
def saved(model, tmp_path):
    config = {"data": {"name": "emt_adsorption"}, "training": {"seed": 0}}
    return save_checkpoint(tmp_path / "good.ckpt", model, config, {"val/mae": 0.1})


@pytest.fixture
def structures():
    return testing.random_structures(torch.Generator().manual_seed(0), natoms=(4, 7))


def energies(model, structures):
    with torch.inference_mode():
        return model(structures)["energy"]


def test_round_trip_is_bit_identical_and_plain(model, saved, structures):
    again = load_model(saved)
    assert not again.training
    assert torch.equal(energies(again, structures), energies(model, structures))
    content = torch.load(saved, weights_only=True)
    assert content["elements_seen"] == [1, 8, 29]
    assert content["units"] == {"energy": "eV", "length": "Å"}
    assert content["config"]["data"]["name"] == "emt_adsorption"
    assert sorted(os.listdir(saved.parent)) == ["good.ckpt"]


def test_same_energies_in_a_new_process(model, saved, structures):
    code = (
        "import sys, torch\n"
        "from flt_mol import testing\n"
        "from flt_mol.training.checkpoints import load_model\n"
        "s = testing.random_structures(torch.Generator().manual_seed(0), natoms=(4, 7))\n"
        "with torch.inference_mode():\n"
        "    print(load_model(sys.argv[1])(s)['energy'].double().tolist())\n"
    )
    run = [subprocess.check_output([sys.executable, "-c", code, str(saved)]) for _ in range(2)]
    assert run[0] == run[1]
    expected = energies(model, structures)
    assert torch.allclose(torch.tensor(eval(run[0])), expected, atol=1e-5)


def test_loading_leaves_the_random_state_alone(saved):
    before = torch.get_rng_state()
    load_model(saved)
    assert torch.equal(before, torch.get_rng_state())


def prefixed(prefix):
    return lambda content: {
        **content,
        "state_dict": {prefix + k: v for k, v in content["state_dict"].items()},
    }


def doubled(content):
    weights = {
        k: v.double() if v.is_floating_point() else v for k, v in content["state_dict"].items()
    }
    return {**content, "state_dict": weights}


@pytest.mark.parametrize(
    "change",
    [
        prefixed("module."),
        prefixed("module.module."),
        prefixed("_orig_mod."),
        prefixed("model."),
        prefixed("module._orig_mod."),
        doubled,
        lambda content: content["state_dict"],
        lambda content: {"model_state_dict": content["state_dict"], "epoch": 3},
    ],
    ids=["ddp", "ddp twice", "compiled", "wrapped", "both", "float64", "bare", "other name"],
)
def test_forms_that_other_tools_leave(change, model, saved, structures):
    torch.save(change(read_checkpoint(saved)), saved)
    assert torch.equal(energies(load_model(saved), structures), energies(model, structures))


def without_first(weights):
    return dict(list(weights.items())[1:])


def wrong_shape(weights):
    key = "head.atom_energy.1.weight"
    return {**weights, key: weights[key].repeat(2, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_first, "missing: elements_seen"),
        (wrong_shape, r"wrong shape: head.atom_energy.1.weight is \(32, 16\), expected \(16, 16\)"),
        (lambda weights: {**weights, "old": torch.zeros(1)}, "not known: old"),
    ],
)
def test_keys_that_do_not_fit_are_listed(change, message, saved):
    content = read_checkpoint(saved)
    torch.save({**content, "state_dict": change(content["state_dict"])}, saved)
    with pytest.raises(ValueError, match=f"(?s)good.ckpt.*{message}"):
        load_model(saved)


def test_half_a_file(saved):
    data = saved.read_bytes()
    saved.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="good.ckpt: checkpoint incomplete"):
        load_model(saved)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x04N."])
def test_not_a_checkpoint(saved, data):
    saved.write_bytes(data)
    with pytest.raises(ValueError, match="good.ckpt"):
        load_model(saved)


def test_python_objects_are_refused(saved):
    torch.save({**read_checkpoint(saved), "args": Namespace(lr=1)}, saved)
    with pytest.raises(ValueError, match="more than tensors and plain data"):
        load_model(saved)


def test_failed_write_leaves_the_old_file(saved, model, monkeypatch):
    def broken(content, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    before = saved.read_bytes()
    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(saved, model, {})
    assert saved.read_bytes() == before
    assert sorted(os.listdir(saved.parent)) == ["good.ckpt"]


def test_a_run_folder_stands_for_its_best(saved):
    best = saved.with_name("best.ckpt")
    saved.rename(best)
    assert find_checkpoint(best.parent) == best


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint at .*missing"):
        find_checkpoint(tmp_path / "missing.ckpt")
