from pathlib import Path

import pytest

from flt_mol import resources
from flt_mol.training.config import known_keys, load_run_config


def test_every_shipped_run_composes():
    for file in resources.folder("configs").glob("*.yaml"):
        config = load_run_config(file.stem)
        assert config.data.name == "emt_adsorption"
        assert config.training.epochs > 0


def test_overrides_reach_every_part():
    config = load_run_config(
        "emt_small",
        ["training.epochs=3", "model.embed_dim=16", "model.rpe.num_frequencies=5", "output=x"],
    )
    assert config.training.epochs == 3
    assert config.model.embed_dim == 16
    assert config.model.rpe is not None
    assert config.model.rpe.num_frequencies == 5
    assert config.output == "x"


def test_model_is_chosen_by_name():
    assert load_run_config("emt_small").model.rpe is not None
    assert load_run_config("emt_small", ["model=emt_performer_small"]).model.rpe is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=3", "unknown key 'training.epoch'; did you mean 'training.epochs'"),
        ("+training.epoch=3", "did you mean 'training.epochs'"),
        ("training.epochs=three", "'three'.*Integer"),
        ("model.heads=3", "unknown key 'model.heads'; did you mean 'model.num_heads'"),
        ("model=emt_smal", "emt_small"),
        ("nonsense", "nonsense"),
    ],
)
def test_wrong_overrides_say_what_is_right(override, message):
    with pytest.raises(ValueError, match=f"emt_small.yaml.*(?s:{message})"):
        load_run_config("emt_small", [override])


def test_unknown_run_lists_the_known():
    with pytest.raises(ValueError, match=r"emt_performer_small, emt_small"):
        load_run_config("emt_smal")
    with pytest.raises(ValueError, match="no configuration file"):
        load_run_config("missing.yaml")


def test_paths_in_a_file_are_relative_to_it(tmp_path, monkeypatch):
    file = tmp_path / "sub" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(
        "defaults: [run_schema, {model: emt_small}, _self_]\n"
        "data: {paths: {train: ../train.lmdb}}\n"
    )
    monkeypatch.chdir("/")
    assert load_run_config(str(file)).data.paths == {"train": str(tmp_path / "train.lmdb")}


def test_paths_on_the_command_line_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_run_config("emt_small", ["data.paths.train=with space=and.lmdb"])
    assert config.data.paths == {"train": str(Path.cwd() / "with space=and.lmdb")}


def test_misspelt_key_in_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [run_schema, _self_]\ntraining: {learning_rat: 1}\n")
    with pytest.raises(ValueError, match="did you mean 'training.learning_rate'"):
        load_run_config(str(file))


def test_a_file_without_the_schema_is_told_so(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("training: {epochs: 1}\n")
    with pytest.raises(ValueError, match="run_schema"):
        load_run_config(str(file))


def test_known_keys_reach_nested_dataclasses():
    assert "model.rpe.num_terms" in known_keys()
    assert "training.beta2" in known_keys()
