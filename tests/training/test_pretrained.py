"""Folders in Hugging Face's layout: what is written, read again, and refused."""

import gzip
import json
import os

import pytest
import torch
import yaml
from conftest import ALL_OUTPUTS, KINDS, all_outputs, small_model

from flt_mol import testing
from flt_mol.cli import main
from flt_mol.models.checkpoint import (
    find_checkpoint,
    load_model,
    read_checkpoint,
    save_checkpoint,
)
from flt_mol.training.pretrained import export_checkpoint, from_pretrained, save_pretrained


@pytest.fixture
def model():
    model = small_model()
    model.normalizer.fit(torch.tensor([-2.0, 1.0, 4.0]))
    model.mark_seen([1, 8, 29])
    return model.eval()


@pytest.fixture
def folder(model, tmp_path):
    save_pretrained(model, tmp_path / "mine", config=RUN, metrics={"val/mae": 0.125, "epoch": 3})
    return tmp_path / "mine"


RUN = {
    "name": "run",
    "output": "/home/me/runs/1",
    "data": {"name": None, "train": "train", "paths": {"train": "/home/me/secret.lmdb"}},
    "finetune": {"checkpoint": "/home/me/old.ckpt", "freeze": []},
}


def energies(model, seed=0):
    structures = testing.random_structures(torch.Generator().manual_seed(seed), natoms=(4, 7))
    with torch.inference_mode():
        return model(structures)["energy"]


def edit(folder, **changes):
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings = {k: v for k, v in {**settings, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")


@pytest.mark.parametrize(
    "kind", ["rpe", "both filters", "centred images, pair types", "pair types"]
)
def test_round_trip_is_bit_identical(kind, tmp_path):
    model = small_model(**all_outputs(KINDS[kind])).eval()
    save_pretrained(model, tmp_path / "a")
    again = from_pretrained(tmp_path / "a")
    assert not again.training
    assert torch.equal(energies(again), energies(model))
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_the_same_model_gives_the_same_bytes(model, folder, tmp_path):
    save_pretrained(
        model, tmp_path / "b" / "mine", config=RUN, metrics={"val/mae": 0.125, "epoch": 3}
    )
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (tmp_path / "b" / "mine" / name).read_bytes()
    assert sorted(os.listdir(folder)) == ["README.md", "config.json", "model.safetensors"]


def test_names_lead_to_it(model, folder):
    assert find_checkpoint(folder) == folder / "model.safetensors"
    assert find_checkpoint(folder / "config.json") == folder / "model.safetensors"
    assert torch.equal(energies(load_model(folder)), energies(model))
    assert torch.equal(energies(load_model(folder / "model.safetensors")), energies(model))


def test_config_says_what_people_ask_and_names_no_place(folder):
    text = (folder / "config.json").read_text("utf-8")
    settings = json.loads(text)
    assert settings["units"] == {"energy": "eV", "length": "Å"}
    assert settings["elements_seen"] == [1, 8, 29]
    assert settings["normalizer"]["energy"]["mean"] == 1.0
    assert settings["model"]["embed_dim"] == 16
    assert settings["metrics"]["val/mae"] == 0.125
    assert settings["config"]["finetune"]["checkpoint"] == "old.ckpt"
    assert "/home/me" not in text
    assert read_checkpoint(folder / "model.safetensors")["config"]["data"]["train"] == "train"


def test_the_card_has_front_matter_and_is_not_overwritten(model, folder):
    text = (folder / "README.md").read_text("utf-8")
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "flt_mol"
    assert "H, O, Cu" in body
    assert "0.1250" in body
    (folder / "README.md").write_text("mine")
    written = save_pretrained(model, folder)
    assert (folder / "README.md").read_text() == "mine"
    assert [path.name for path in written] == ["model.safetensors", "config.json"]


def test_shared_and_gappy_tensors(model, tmp_path):
    blocks = model.encoder.blocks
    blocks[1].ffn[0].weight = blocks[0].ffn[0].weight
    with torch.no_grad():
        blocks[0].attention.query.weight.data = blocks[0].attention.query.weight.data.t()
        blocks[0].attention.feature_map.content_projection = torch.ones(1).expand(
            blocks[0].attention.feature_map.content_projection.shape
        )
    save_pretrained(model, tmp_path / "a")
    assert torch.equal(energies(from_pretrained(tmp_path / "a")), energies(model))


def test_other_dtypes_are_kept_in_the_file(model, tmp_path):
    save_pretrained(model.to(torch.bfloat16), tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "config.json").read_text("utf-8"))
    assert settings["torch_dtype"] == "bfloat16"
    again = from_pretrained(tmp_path / "a")
    assert again.head.tag_weight.dtype == torch.float32
    assert torch.equal(again.head.tag_weight, model.head.tag_weight.float())


def test_integers_among_the_buffers(model, tmp_path):
    model.encoder.register_buffer("count", torch.tensor(2**40, dtype=torch.int64))
    save_pretrained(model, tmp_path / "a")
    state = read_checkpoint(tmp_path / "a" / "model.safetensors")["state_dict"]
    assert state["encoder.count"].item() == 2**40
    with pytest.raises(ValueError, match="not known: encoder.count"):
        from_pretrained(tmp_path / "a")


def test_wrapped_weights_of_other_tools(model, folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({f"model.{k}": v for k, v in load_file(file).items()}, file)
    edit(folder, sha256=None)
    assert torch.equal(energies(load_model(folder)), energies(model))


@pytest.mark.parametrize("name", ["model.safetensors", "old.ckpt"])
def test_compressed_checkpoints(name, folder):
    save_checkpoint(folder / "old.ckpt", load_model(folder), {})
    path = folder / name
    assert load_model(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{name} is compressed \(gzip\): unpack it first"):
        load_model(path)


def test_a_file_that_lacks_the_other_one(folder, tmp_path, capsys):
    (tmp_path / "weights").mkdir()
    told = "there is no config.json beside it.*put"
    for lone in (tmp_path / "weights" / "model.safetensors", tmp_path / "mine.safetensors"):
        lone.write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(ValueError, match=f"{lone.name}: {told}"):
            load_model(lone)
    assert main(["predict", str(tmp_path / "weights"), "POSCAR"]) == 2
    assert "there is no config.json beside it" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    for given in (folder, folder / "config.json"):
        with pytest.raises(ValueError, match="and no model.safetensors beside it.* flt-mol export"):
            load_model(given)
    with pytest.raises(ValueError, match="and no model.safetensors beside it"):
        from_pretrained(folder)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_cut_short(cut, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"model\.safetensors: checkpoint incomplete"):
        load_model(folder)


def test_a_flipped_bit_is_noticed(model, folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[data.index(model.embedding.element.weight.detach().numpy().tobytes())] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: checkpoint damaged: its SHA-256"):
        load_model(folder)
    edit(folder, sha256=None)
    load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, r"config\.json: written by flt_mol .* in format 2.*install"),
        ({"format_version": "new"}, "in format new"),
        ({"metric": {}}, r"config\.json: unknown key 'metric'; did you mean 'metrics'"),
        ({"zzz": 1}, "unknown key 'zzz'; known: architectures"),
        ({"model": 3}, r"config\.json: no 'model' in it"),
        ({"model": {"embed_dm": 16}}, "unknown model setting embed_dm; did you mean embed_dim"),
        ({"elements_seen": [1, 2]}, r"config\.json: elements_seen is \[1, 2\], and the weights"),
        ({"normalizer": {}}, r"config\.json: normalizer is \{\}"),
        ({"model_type": "bert", "format": "x"}, "config.json beside it is not one of flt_mol"),
    ],
)
def test_a_config_that_does_not_belong(changes, message, folder):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_keys_that_the_hub_adds_are_no_mistake(model, folder):
    edit(folder, _name_or_path="me/mine", transformers_version="5.0")
    assert torch.equal(energies(from_pretrained(folder)), energies(model))


@pytest.mark.parametrize("text", ["{", "\xff", "[1]"])
def test_a_config_that_is_no_json(text, folder):
    (folder / "config.json").write_text(text, "latin-1")
    with pytest.raises(ValueError, match="this is no valid json|is not one of flt_mol"):
        load_model(folder)


def test_weights_of_another_size_are_listed(folder):
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    edit(folder, model={**settings["model"], "ffn_dim": 48})
    with pytest.raises(ValueError, match=r"wrong shape: encoder\.blocks\.0\.ffn\.0\.weight"):
        load_model(folder)


def test_half_a_folder(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    for read in (load_model, from_pretrained):
        with pytest.raises(ValueError, match=r"no model\.safetensors"):
            read(folder)
    with pytest.raises(ValueError, match="no checkpoint at"):
        load_model(tmp_path)


def test_a_folder_of_something_else_is_not_written_over(model, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"config\.json describes something else"):
        save_pretrained(model, tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_failed_write_leaves_the_files_before(model, folder, monkeypatch):
    before = (folder / "config.json").read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(type(folder), "replace", full)
    with pytest.raises(OSError, match="No space left on device: '.*mine'"):
        save_pretrained(small_model(embed_dim=32), folder)
    assert (folder / "config.json").read_bytes() == before
    assert sorted(os.listdir(folder)) == ["README.md", "config.json", "model.safetensors"]


def test_the_command_exports_what_evaluate_and_predict_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", "emt_small", "out"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert main(["evaluate", "out", "--split", "val_id", "--json"]) == 0
    mae = json.loads(capsys.readouterr().out)["splits"]["val_id"]["mae"]
    assert mae == pytest.approx(0.1084, abs=2e-4)
    assert main(["export", "out", "again"]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert main(["export", "nothing", "out"]) == 2
    assert main(["export", "emt_small", "out/config.json"]) == 2
    assert "is a file" in capsys.readouterr().err


def test_export_of_a_run_keeps_all_outputs(tmp_path):
    from flt_mol.models.checkpoint import save_checkpoint

    model = small_model(outputs=ALL_OUTPUTS[:2])
    model.normalizer_initial.fit(torch.tensor([2.0, 4.0]))
    save_checkpoint(tmp_path / "best.ckpt", model, RUN, {"val/mae": float("nan")})
    export_checkpoint(tmp_path, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert settings["normalizer"]["energy_initial"]["mean"] == 3.0
    assert settings["metrics"] == {}


def test_a_folder_says_what_the_model_was_trained_on(tmp_path):
    model = small_model()
    model.trained_on = {"systems": 5, "energy_median": -0.5, "most_atoms": 52}
    save_pretrained(model, tmp_path / "shared")
    assert from_pretrained(tmp_path / "shared").trained_on == model.trained_on


def test_weights_that_are_not_finite_are_not_handed_on(model, tmp_path):
    with torch.no_grad():
        model.embedding.element.weight[7, 2] = float("nan")
    with pytest.raises(ValueError, match=r"^embedding\.element\.weight holds numbers that are not"):
        save_pretrained(model, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
