from dataclasses import replace
from pathlib import Path

import pytest

from flt_mol.files import shipped_folder
from flt_mol.models.config import PairConfig
from flt_mol.training.config import known_keys, load_run_config
from flt_mol.training.overrides import check_overrides


def test_every_shipped_run_composes():
    for file in shipped_folder("configs").glob("*.yaml"):
        config = load_run_config(file.stem)
        own = config.data.validation_fraction is not None
        assert own or config.data.name in ("emt_adsorption", "oc20_is2re")
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
        ("trainin.epochs=3", "unknown key 'trainin.epochs'; did you mean 'training.epochs'"),
        ("foo.bar=3", "known here: data, model, training, loss, finetune, output"),
        ("data.paths.train=", "data.paths.train is empty"),
        ("training.epochs=0", "training.epochs is 0, expected at least 1"),
        ("training.epochs=-1", "training.epochs is -1"),
        ("training.max_steps=-1", r"training.max_steps is -1, expected null \(all epochs\)"),
        ("training.max_steps=0", "training.max_steps is 0"),
        ("training.batch_size=0", "training.batch_size is 0"),
        ("training.batch_atoms=0", r"training.batch_atoms is 0, expected null \(batch_size counts"),
        ("training.learning_rate=0", "training.learning_rate is 0.0, expected above 0"),
        ("training.learning_rate=nan", "training.learning_rate is nan"),
        ("training.learning_rate=inf", "training.learning_rate is inf"),
        ("training.warmup_fraction=1.5", "from 0 to 1"),
        ("training.decay=step", "training.decay is 'step', expected one of linear, cosine"),
        ("training.warmup_steps=x", "training.warmup_steps|'x'"),
        ("loss.displacement=1", "did you mean 'loss.displacement_decay'|known here: "),
        ("loss.displacement_weight=1", "no output displacement: add it to model.outputs, or set"),
        ("model.pairs={cutof: 4.0}", "'model.pairs.cutof'; did you mean 'model.pairs.cutoff'"),
        ("model.pairs={cutoff: x}", "'x' .*model.pairs.cutoff"),
        ("model.pairs.cutoff=4", r"model.pairs is null; give it with model.pairs=.cutoff: 4.$"),
        ("model.pairs={cutoff: 1,2}", r"{cutoff: 1,2}' cannot be read .*; expected KEY=.*quotes$"),
        ("model.pairs={cutoff: 4.0},{cutoff: 5.0}", "gives several values, and a run.*in quotes$"),
        ("model=emt_small,emt_performer_small", "gives several values, and a run takes one"),
        ("training.epochs=range(1,3)", "gives several values"),
        ("model.pairs={cutoff: choice(1,2)}", "gives several values"),
        ("model.pairs={cutoff: 4.0, cutoff: 5.0}", "gives 'cutoff' twice: leave one of them out$"),
        ("training={epochs: 1, seed: 2, epochs: 2}", "gives 'epochs' twice"),
        ("data.paths={train: a, train: b}", "gives 'train' twice"),
        ("training.epochs", r"'training.epochs' cannot be read .*expected KEY=VALUE"),
        ("=3", "'=3' has no key; expected KEY=VALUE$"),
        ("model.outputs.0=foo", "model.outputs has 'foo'; known: energy, energy_initial, displ"),
        ("model.outputs.x=foo", "'x' is no place in a list: 0, 1, …$"),
        ("model.outputs.7=foo", "model.outputs.7=foo: the list has no such place$"),
        ("model.outputs=energy", r"model.outputs=energy: expected a list, \[a,b\]$"),
        ("model.pairs=3", r"pairs=3: expected a mapping of its settings, {key: value}$"),
        ("model.pairs={cutoff: {a: 1}}", r"to Float \(model.pairs.cutoff\)$"),
        ("model.pairs={cutoff: 1e9}", "model.pairs.cutoff is 1000000000.0, expected at most 100 Å"),
        ("training.rotation=x", "one of none, z, full"),
        ("training.accelerator=quantum", "one of auto, cpu"),
        ("training.precision=8", "one of 32-true"),
        ("training.gradient_clip=0", "training.gradient_clip is 0.0"),
        ("training.num_workers=-1", "training.num_workers is -1"),
        ("training.beta2=1", "training.beta2 is 1.0, expected from 0 to below 1"),
        ("model.embed_dim=0", "model.embed_dim is 0"),
        ("model.embed_dim=66", "model.embed_dim is 66, expected a multiple of model.num_heads, 4"),
        ("model.num_layers=0", "model.num_layers is 0"),
        ("model.dropout=1", "model.dropout is 1.0"),
        ("model.attention=full", "one of linear, exact"),
        ("model.rpe.sigma_min=9", "no more than model.rpe.sigma_max, 6.0"),
        ("model.rpe.form=x", "model.rpe.form is 'x'"),
    ],
)
def test_wrong_overrides_say_what_is_right(override, message):
    with pytest.raises(ValueError, match=f"emt_small.yaml.*(?s:{message})"):
        load_run_config("emt_small", [override])


@pytest.mark.parametrize(
    "override",
    [
        "a={b: x:y, x: 1}",
        "a=[w,x:y,x:z]",
        "a={b: {c: 1}, c: 2}",
        "a={b: 'x, b: 1', c: 2}",
        "a={b: int(3), c: int(3)}",
        "a=[{b: 1},{b: 2}]",
        "a={b: ${x:y}, y: 1}",
        "a='1,2'",
    ],
)
def test_what_only_looks_repeated_passes(override):
    check_overrides([override])


@pytest.mark.parametrize(
    "override",
    ["a={b:1,b:2}", "a={c: {b: 1, b: 2}}", "a=[{b: 1, c: [2], b: 3}]", "a={b: {}, b: 2}"],
)
def test_keys_given_twice(override):
    with pytest.raises(ValueError, match="gives 'b' twice"):
        check_overrides([override])


def test_unknown_run_names_the_nearest_or_all():
    with pytest.raises(ValueError, match=r"'emt_smal' in configs/ \(did you mean emt_small\?\)"):
        load_run_config("emt_smal")
    with pytest.raises(ValueError, match=r"emt_performer_small, emt_small"):
        load_run_config("nonsense")
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


@pytest.mark.parametrize("name", ["it's, a=b", "größe", "{a: b}", "[x]", "a#b !", "x\\'"])
@pytest.mark.parametrize("key", ["output", "data.name", "data.paths.train"])
def test_paths_need_no_quotes(key, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    config = load_run_config("emt_small", [f"{key}={name}", "training.epochs=2"])
    assert config.training.epochs == 2
    whole = str(Path.cwd() / name)
    if key == "output":
        assert config.output == name
    else:
        assert (config.data.name if key == "data.name" else config.data.paths["train"]) == whole


def test_quotes_null_and_a_mapping_of_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_run_config(
        "emt_small", ["data.paths={train: a.lmdb, val_id: 'b c.lmdb'}", "output='x y'"]
    )
    assert config.data.paths == {
        "train": str(Path.cwd() / "a.lmdb"),
        "val_id": str(Path.cwd() / "b c.lmdb"),
    }
    assert config.output == "x y"
    assert load_run_config("emt_small", ["output=null"]).output is None


def test_a_data_sets_folder_is_taken_from_the_file_and_from_the_working_directory(
    tmp_path, monkeypatch
):
    for place in ("of_file", "of_me"):
        (tmp_path / place / "mine").mkdir(parents=True)
    file = tmp_path / "of_file" / "a, b=ü.yaml"
    file.write_text("defaults: [run_schema, _self_]\ndata: {name: mine}\n")
    monkeypatch.chdir(tmp_path / "of_me")
    assert load_run_config(str(file)).data.name == str(tmp_path / "of_file" / "mine")
    assert load_run_config(str(file), ["data.name=mine"]).data.name == str(Path.cwd() / "mine")
    assert load_run_config("emt_small").data.name == "emt_adsorption"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.yaml", "a: [1\nb: 2\n", r"bad.yaml, line 2: this is no valid yaml"),
        ("latin.yaml", "a: é", "latin.yaml: this is no valid yaml"),
        (
            "twice.yaml",
            "defaults: [run_schema]\na: 1\na: 2\n",
            "twice.yaml.*duplicate key a.*line 3",
        ),
        ("list.yaml", "[1, 2]", "holds no mapping"),
        ("empty.yaml", "", "holds no mapping"),
        ("other.yml", "a: 1", r"only .yaml is read; rename it to .*other.yaml"),
        ("five.yaml", "defaults: [run_schema, _self_]\n5: 1\n", "unknown key '5'"),
    ],
)
def test_files_that_are_no_configuration(name, text, message, tmp_path):
    file = tmp_path / name
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        load_run_config(str(file))


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
    keys = known_keys()
    assert len(set(keys)) == len(keys)
    for key in ("model.rpe.num_terms", "model.pairs.cutoff", "training.beta2", "data.paths"):
        assert key in keys


def test_parts_that_are_null_are_set_whole(tmp_path):
    pairs = load_run_config(
        "emt_small", ["model.pairs={cutoff: 4.0}", "model.pairs.vectors=8", "training.epochs=2"]
    ).model.pairs
    assert pairs == PairConfig(cutoff=4.0, vectors=8)
    assert load_run_config("emt_small", ["model.pairs={}", "model.pairs=null"]).model.pairs is None
    rpe = load_run_config("emt_small", ["model.rpe={num_terms: 3}"]).model.rpe
    assert rpe == replace(load_run_config("emt_small").model.rpe, num_terms=3)
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [run_schema, {model: emt_small}, _self_]\nmodel: {pairs: {vectors: 4}}\n"
    )
    assert load_run_config(str(file)).model.pairs == PairConfig(vectors=4)
    changed = load_run_config(str(file), ["model.pairs={cutoff: 3.0}"]).model.pairs
    assert changed == PairConfig(cutoff=3.0, vectors=4)


MORE = ["model.outputs=[energy,energy_initial,displacement]", "model.pairs={cutoff: 4.0}"]


def test_losses_of_more_outputs_and_passes():
    config = load_run_config(
        "emt_small",
        [
            *MORE,
            "model.recycles=3",
            "loss.pass_weights=[0,0.5,1]",
            "loss.displacement_weight=2",
            "loss.displacement_decay=cosine",
            "training.interpolation=0.5",
        ],
    )
    assert config.loss.pass_weights == [0.0, 0.5, 1.0]
    assert config.loss.displacement_weight == 2.0
    assert config.loss.energy_initial_weight is None


def test_the_papers_optimiser():
    config = load_run_config(
        "emt_small",
        [
            "training.optimizer=adam",
            "training.learning_rate=3e-4",
            "training.batch_size=64",
            "training.warmup_steps=10000",
            "training.max_steps=500000",
            "training.decay=linear",
        ],
    )
    training = config.training
    assert (training.beta1, training.beta2, training.eps) == (0.9, 0.98, 1e-6)
    assert (training.weight_decay, training.warmup_steps) == (1e-3, 10_000)
