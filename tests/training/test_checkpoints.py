import contextlib
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from argparse import Namespace

import pytest
import torch
from conftest import small_model

from flt_mol import testing
from flt_mol.models.checkpoint import (
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
        "from flt_mol.models.checkpoint import load_model\n"
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


def averaged(content):
    weights = {f"module.{k}": v for k, v in content["state_dict"].items()}
    return {"state_dict": {"n_averaged": torch.tensor(3), **weights}}


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
        averaged,
    ],
    ids=[
        "ddp",
        "ddp twice",
        "compiled",
        "wrapped",
        "both",
        "float64",
        "bare",
        "other name",
        "averaged",
    ],
)
def test_forms_that_other_tools_leave(change, model, saved, structures):
    torch.save(change(read_checkpoint(saved)), saved)
    assert torch.equal(energies(load_model(saved), structures), energies(model, structures))


def without_first(weights):
    return dict(list(weights.items())[1:])


def retyped(dtype):
    return lambda weights: {**weights, "normalizer.std": weights["normalizer.std"].to(dtype)}


def wrong_shape(weights):
    key = "head.atom_energy.1.weight"
    return {**weights, key: weights[key].repeat(2, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_first, "missing: elements_seen"),
        (wrong_shape, r"wrong shape: head.atom_energy.1.weight is \(32, 16\), expected \(16, 16\)"),
        (lambda weights: {**weights, "old": torch.zeros(1)}, "not known: old"),
        (retyped(torch.int64), "wrong type: normalizer.std is torch.int64, expected torch.float32"),
        (retyped(torch.complex64), "wrong type: normalizer.std is torch.complex64"),
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


def test_named_models_without_weights_are_told_from_wrong_names():
    with pytest.raises(ValueError, match=r"shipped without weights; train one .*emt_flt-base\)"):
        find_checkpoint("flt-base")
    with pytest.raises(ValueError, match="no checkpoint at 'flt-bas': give"):
        find_checkpoint("flt-bas")


def test_flipped_bits_in_a_tensor_are_noticed(saved, model):
    value = model.embedding.element.weight.detach().numpy().tobytes()
    data = bytearray(saved.read_bytes())
    data[data.index(value) + 10] ^= 0x40
    saved.write_bytes(data)
    torch.load(saved, weights_only=True)  # torch does not mind
    with pytest.raises(ValueError, match=r"good.ckpt: checkpoint damaged.*entry 'data/"):
        load_model(saved)


def test_every_flipped_byte_loads_the_same_or_is_refused(saved, model, structures):
    data, expected = saved.read_bytes(), energies(model, structures)
    for place in range(7, len(data), len(data) // 40):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        saved.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert torch.equal(energies(load_model(saved), structures), expected)


def test_a_file_that_may_not_be_read_says_so(saved, monkeypatch):
    def refuse(self, *args, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(saved), "open", refuse)
    with pytest.raises(ValueError, match="good.ckpt: cannot be read: Permission denied"):
        load_model(saved)


def test_torch_advice_is_not_passed_on(saved):
    torch.save({**read_checkpoint(saved), "args": Namespace(lr=1)}, saved)
    with pytest.raises(ValueError, match=r"\(argparse.Namespace\)") as caught:
        load_model(saved)
    assert "\x1b" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


def config_json(saved, **changes):
    good = json.loads(bytes(read_checkpoint(saved)["state_dict"]["config_json"].tolist()))
    return json.dumps({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": "64"}, "model.embed_dim is '64', expected a whole number"),
        ({"embed_dim": True}, "model.embed_dim is True"),
        ({"embed_dim": -4}, "model.embed_dim is -4, expected at least 1"),
        ({"embed_dim": 10**9}, "takes at least .* weights, and the file holds"),
        ({"num_layers": 10**8}, "takes at least"),
        ({"num_heads": 0}, "model.num_heads is 0"),
        ({"num_heads": 3}, "multiple of model.num_heads"),
        ({"rpe": 5}, "model.rpe is 5"),
        ({"rpe": {"num_terms": 10**9}}, "takes at least"),
        ({"pairs": {"num_basis": 10**9}}, "takes at least"),
        ({"pairs": {"vectors": 10**9}}, "takes at least"),
        ({"pairs": {"filter_vectors": 10**9}}, "takes at least"),
        ({"spectral": {"num_basis": 10**9}}, "takes at least"),
        ({"images": {"num_basis": 10**9}, "attention": "exact", "rpe": None}, "takes at least"),
        ({"widht": 3}, "unknown model setting widht"),
        (None, "not usable"),
    ],
)
def test_garbage_in_the_model_configuration(changes, message, saved):
    content = read_checkpoint(saved)
    text = "[1]" if changes is None else config_json(saved, **changes)
    weights = {**content["state_dict"], "config_json": torch.tensor(list(text.encode()))}
    torch.save({**content, "state_dict": weights}, saved)
    with pytest.raises(ValueError, match=f"good.ckpt: .*{message}"):
        load_model(saved)


@pytest.mark.parametrize("value", [torch.ones(2, 2), torch.ones(2, dtype=torch.complex64), "text"])
def test_a_model_configuration_that_is_no_text(value, saved):
    content = read_checkpoint(saved)
    torch.save({**content, "state_dict": {**content["state_dict"], "config_json": value}}, saved)
    with pytest.raises(ValueError, match="good.ckpt: .*(garbled|expected a name → tensor)"):
        load_model(saved)


@pytest.mark.parametrize("entry", [{5: torch.zeros(1)}, {"x": [1.0]}])
def test_weights_are_tensors_by_name(entry, saved):
    content = read_checkpoint(saved)
    torch.save({**content, "state_dict": {**content["state_dict"], **entry}}, saved)
    with pytest.raises(ValueError, match="good.ckpt: its state_dict holds"):
        load_model(saved)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ([1], None),
        ({"data": 5, "x": 1}, {"x": 1}),
        ({"data": {"paths": {"a": 5}}}, {}),
        ({"data": {"name": 3}}, {}),
        ({"data": {"evaluation": [1]}}, {}),
        ({"data": {"paths": {"a": "b"}, "name": None}},) * 2,
    ],
)
def test_configurations_of_others_are_left_out(config, kept, saved):
    torch.save({**read_checkpoint(saved), "config": config}, saved)
    assert read_checkpoint(saved).get("config") == kept
    load_model(saved)


def test_safetensors(saved, model, structures):
    safetensors = pytest.importorskip("safetensors.torch")
    file = saved.with_suffix(".safetensors")
    safetensors.save_file(read_checkpoint(saved)["state_dict"], file)
    assert torch.equal(energies(load_model(file), structures), energies(model, structures))
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    with pytest.raises(ValueError, match="good.safetensors: checkpoint incomplete"):
        load_model(file)


@pytest.mark.parametrize("device", ["foo", "cuda:x", "", "cuda:99", "xpu:7"])
def test_devices_that_are_not_there(device, tmp_path):
    with pytest.raises(ValueError, match="device"):
        load_model(tmp_path / "never read.ckpt", map_location=device)


def test_checkpoints_have_the_checksums_that_are_compared(saved):
    with zipfile.ZipFile(saved) as archive:
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)


def test_a_later_format_says_so(saved):
    torch.save({**read_checkpoint(saved), "format_version": 2, "flt_mol_version": "9.1"}, saved)
    with pytest.raises(ValueError, match=r"good.ckpt: written by flt_mol 9.1 in format 2.*install"):
        load_model(saved)


def test_checkpoints_are_brought_to_the_disk(model, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    save_checkpoint(tmp_path / "a.ckpt", model, {})
    assert len(synced) == 2


def test_what_it_was_trained_on_comes_back_and_may_be_missing(tmp_path):
    model = small_model()
    model.trained_on = {"systems": 5, "energy_median": -0.5, "most_atoms": 52}
    path = save_checkpoint(tmp_path / "a.ckpt", model, {})
    assert load_model(path).trained_on == model.trained_on
    content = torch.load(path, weights_only=True)
    for odd in ([1], {"systems": "many", "energy_median": math.nan, 3: 4, "most_atoms": True}):
        torch.save({**content, "trained_on": odd}, path)
        assert load_model(path).trained_on == {}
    del content["trained_on"]
    torch.save(content, path)
    assert load_model(path).trained_on == {}


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 812345\n", "lfs pull"),
        (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "web page or XML"),
        (b"\x1f\x8b" + bytes(40), "compressed .gzip.: unpack it first"),
    ],
    ids=["pointer", "page", "gzip"],
)
def test_what_stands_in_a_checkpoints_place_is_named(content, message, suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is .*{message}"):
        read_checkpoint(path)
