"""How yaml, named models and overrides make up a run."""

from pathlib import Path

import pytest
import yaml
from conftest import small_model

from flt_mol.files import shipped_folder
from flt_mol.models import EnergyConfig, named_config
from flt_mol.models.checkpoint import save_checkpoint
from flt_mol.training.config import (
    DataConfig,
    FinetuneConfig,
    LossConfig,
    RunConfig,
    TrainingConfig,
    load_run_config,
    run_name,
    run_yaml,
)

FROZEN = yaml.safe_load(Path(__file__).with_name("resolved_runs.yaml").read_text(encoding="utf-8"))
DEFAULTS = FROZEN.pop("defaults")


def over(base, changes):
    """`changes` on `base`; families of the RPE as a whole."""
    out = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict) and "name" not in value
        out[key] = over(base[key], value) if nested or key == "data" else value
    return out


@pytest.fixture
def run_file(tmp_path):
    def write(text, name="mine.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_runs_are_those_that_are_frozen():
    assert set(FROZEN) == {file.stem for file in shipped_folder("configs").glob("*.yaml")}
    assert RunConfig().model_dump(exclude={"output"}) == DEFAULTS


@pytest.mark.parametrize("name", FROZEN)
def test_what_a_run_resolves_to_and_that_it_trains_again(name, run_file):
    config = load_run_config(name)
    assert config.model_dump(exclude={"output"}) == over(DEFAULTS, FROZEN[name])
    assert load_run_config(run_file(run_yaml(config), "config.yaml")) == config


@pytest.mark.parametrize(
    ("name", "layers"),
    [("paper-flt-10l", 10), ("paper-flt-12l", 12), ("paper-performer-12l", 12)],
)
def test_the_papers_numbers(name, layers):
    """Choromanski, Li et al. 2024, appendix on OC20: the model and its training."""
    config = load_run_config(f"oc20_all_{name}")
    model, training = config.model, config.training
    assert (model.num_layers, model.embed_dim, model.num_heads) == (layers, 768, 48)
    assert (model.ffn_dim, model.recycles, model.num_features) == (2048, 4, 64)
    assert (model.attention, model.feature_map) == ("linear", "softmax")
    assert (model.dropout, model.attention_dropout) == (0.0, 0.1)
    if "flt" in name:
        spectrum, frequencies = model.rpe.spectrum, model.rpe.frequencies
        assert [spectrum[k] for k in ("name", "num_terms", "form")] == ["gaussian", 32, "weight"]
        assert [frequencies[k] for k in ("name", "num_frequencies")] == ["gaussian", 16]
        assert frequencies["learned_sigma"]
        assert frequencies["learned_mean"]
    else:
        assert model.rpe is None
    assert (training.batch_size, training.max_steps, training.warmup_steps) == (64, 500_000, 10_000)
    assert (training.optimizer, training.learning_rate, training.decay) == ("adam", 3e-4, "linear")
    assert (training.beta1, training.beta2, training.eps) == (0.9, 0.98, 1e-6)
    assert (training.weight_decay, training.gradient_clip) == (1e-3, 5.0)


def test_layers_in_order(run_file):
    """Named model, then the file, then the command line."""
    text = "model: {name: flt-small, dropout: 0.1, num_layers: 5, pairs: {vectors: 0, cutoff: 4.5}}"
    config = load_run_config(run_file(text), ["model.dropout=0.2", "model.pairs.num_basis=16"])
    model = named_config("flt-small")
    assert (config.model.dropout, config.model.num_layers) == (0.2, 5)
    assert (config.model.pairs.cutoff, config.model.pairs.num_basis) == (4.5, 16)
    assert config.model.pairs.filter_vectors == model.pairs.filter_vectors
    assert config.model.readout == model.readout


@pytest.mark.parametrize("given", ["model=emt_small", "model=emt-small", "model={name: emt_small}"])
def test_a_model_of_the_command_line_takes_the_place_of_the_files(given, run_file):
    file = run_file("model: {name: flt-small, dropout: 0.1}\ndata: {name: emt-adsorption}")
    assert load_run_config(file, [given]).model == named_config("emt-small")
    changed = load_run_config(file, ["model.seed=3", given, "model.recycles=2"]).model
    assert changed.recycles == 2
    config = load_run_config(file, ["data=oc20_is2re"])
    assert config.data.name == "oc20_is2re"
    assert config.model.dropout == 0.1


def test_families_of_the_rpe(run_file):
    config = load_run_config(
        run_file("model: {name: emt-small, rpe: {spectrum: matern, split: symmetric}}"),
        ["model.rpe.frequencies={name: lattice, radius: 5.0, sigma: 1.5}"],
    )
    assert config.model.rpe.spectrum["nu"] == 1.5
    assert config.model.rpe.frequencies["radius"] == 5.0
    assert config.model.rpe.split == "symmetric"
    config = load_run_config("emt_small", ["model.rpe.spectrum.num_terms=8"])
    expected = {**named_config("emt-small").rpe.spectrum, "num_terms": 8}
    assert config.model.rpe.spectrum == expected


def test_values_of_overrides_are_yaml():
    config = load_run_config(
        "emt-small",
        [
            *("training.learning_rate=1e-4", "training.gradient_clip=null", "data.tag_rule=3"),
            *("training.loggers=[csv]", "model.rpe=null", "training.shift_images=false"),
            "data.paths={train: a.lmdb}",
        ],
    )
    assert config.training.learning_rate == 1e-4
    assert config.training.gradient_clip is None
    assert config.training.loggers == ["csv"]
    assert config.model.rpe is None
    assert not config.training.shift_images
    assert config.data.tag_rule == "3"
    assert config.data.paths == {"train": str(Path("a.lmdb").resolve())}


ODD = "Jo's, 2nd=[run] {a: 1} #3 ${x}"


def test_paths_survive_as_they_are(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ODD).mkdir()
    given = ["data.paths.val_id", "data.paths.my.split", "output", "data.name"]
    config = load_run_config("emt_small", [f"{key}={ODD}" for key in given])
    assert config.data.paths == dict.fromkeys(("val_id", "my.split"), str(tmp_path / ODD))
    assert config.output == ODD
    assert config.data.name == str(tmp_path / ODD)
    assert load_run_config("emt_small", [f'output="{ODD}"']).output == ODD
    assert load_run_config("emt-small", ["output=null"]).output is None


def test_relative_paths_of_a_file_are_taken_from_its_folder(run_file, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    file = run_file(
        "data: {name: set, paths: {test: a.lmdb}}\noutput: out\nfinetune: {checkpoint: flt-small}"
    )
    monkeypatch.chdir(Path(tmp_path.anchor))
    config = load_run_config(file, ["data.paths.other=b.lmdb"])
    assert config.data.name == str(tmp_path / "set")
    assert config.data.paths == {
        "test": str(tmp_path / "a.lmdb"),
        "other": str(Path("b.lmdb").resolve()),
    }
    assert config.output == str(tmp_path / "out")
    assert config.finetune.checkpoint == "flt-small"


def test_a_run_that_fine_tunes_has_the_model_of_its_checkpoint(run_file, tmp_path):
    model = small_model(num_layers=1)
    path = save_checkpoint(tmp_path / "best.ckpt", model, {})
    file = run_file("model: {name: flt-small, dropout: 0.1}\nfinetune: {checkpoint: best.ckpt}")
    config = load_run_config(file, ["model.recycles=2"])
    expected = model.config.model_copy(update={"dropout": 0.1, "recycles": 2})
    assert config.model == expected
    assert config.finetune.checkpoint == str(path)
    assert load_run_config("finetune", [f"finetune.checkpoint={path}"]).model == model.config
    with pytest.raises(ValueError, match="emt-small"):
        load_run_config(file, ["model=emt-small"])
    with pytest.raises(ValueError, match=r"none\.ckpt"):
        load_run_config("finetune", ["finetune.checkpoint=none.ckpt"])


def test_a_validation_file_takes_the_place_of_the_share_of_a_shipped_run():
    val = "data.paths.val=a.xyz"
    assert load_run_config("finetune").data.validation_fraction == 0.2
    assert load_run_config("finetune", [val]).data.validation_fraction is None
    with pytest.raises(ValueError, match=r"data\.validation_fraction"):
        load_run_config("finetune", [val, "data.validation_fraction=0.3"])


def test_training_data_of_ones_own_are_not_validated_on_another_data_set():
    data = load_run_config("quickstart", ["data.paths.train=a.xyz"]).data
    assert (data.name, data.validation_fraction) == (None, 0.1)
    assert load_run_config("scratch", ["data.paths.train=a.xyz"]).data == data
    data = load_run_config("quickstart", ["data.paths.train=a.xyz", "data.paths.val_id=b.xyz"]).data
    assert (data.name, data.validation_fraction) == (None, None)
    assert load_run_config("quickstart").data.name == "emt_adsorption"


def test_a_file_for_a_split_that_is_not_read_is_warned_of():
    with pytest.warns(UserWarning, match=r"data\.paths\.val is not read.*data\.paths\.val_id"):
        load_run_config("quickstart", ["data.paths.train=a.xyz", "data.paths.val=b.xyz"])


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["training.epoch=2"], ["'training.epoch'", "training.epochs?"]),
        (["trainin.epochs=2"], ["'trainin'", "training?"]),
        (["model.pairs.cutof=2"], ["'model.pairs.cutof'", "model.pairs.cutoff?"]),
        (["training.epochs=0"], ["training.epochs is 0", "equal to 1"]),
        (["training.epochs=1,2"], ["training.epochs is '1,2'", "integer"]),
        (["training.batch_size=true"], ["training.batch_size is True"]),
        (["training.loggers=csv"], ["training.loggers is 'csv'", "list"]),
        (["training.optimizer=sgd"], ["training.optimizer is 'sgd'", "adamw"]),
        (["training=3"], ["training is 3", "mapping"]),
        (["data.tag_rule=oc21"], ["data.tag_rule"]),
        (["data.paths.train="], ["data.paths.train"]),
        (["loss.recycle_weights=[1, 1]"], ["loss.recycle_weights", "model.recycles"]),
        (["model=flt-tiny"], ["flt-tiny", "flt-small"]),
        (["model.embed_dim=10"], ["model.embed_dim is 10", "model.num_heads, 4"]),
        (["training.epochs"], ["training.epochs", "KEY=VALUE"]),
        (["training.loggers=[csv"], ["training.loggers=[csv"]),
        (["defaults=[a]"], ["'defaults'"]),
    ],
)
def test_wrong_overrides_are_named_in_one_line(overrides, names):
    with pytest.raises(ValueError, match=r"emt_small\.yaml with ") as caught:
        load_run_config("emt_small", overrides)
    assert all(name in str(caught.value) for name in names), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("training: {epochs: 3", ["line"]),
        ("training: {epochs: 3}\ntraining: {seed: 1}", ["training"]),
        ("- 1", ["mapping"]),
        ("training: {epochs: }", ["training.epochs is null"]),
        ("training: {epochs: [1]}", ["training.epochs is [1]"]),
        ("finetune: flt-small", ["finetune is 'flt-small'"]),
        ("defaults: [run_schema]", ["'defaults'", "training"]),
        ("model: {name: 3}", ["'3'"]),
    ],
)
def test_wrong_files_are_named(text, names, run_file):
    with pytest.raises(ValueError, match=r"mine\.yaml") as caught:
        load_run_config(run_file(text))
    assert all(name in str(caught.value) for name in names), caught.value


def test_runs_by_name():
    for wrong, hint in (("emt_smal", "emt_small"), ("zzz", "quickstart"), ("a.yaml", "a.yaml")):
        with pytest.raises(ValueError, match=hint):
            load_run_config(wrong)
    assert run_name("runs/mine/config.yaml") == run_name("mine.yaml") == "mine"
    assert run_name("emt-small") == run_name("emt_small")


MOVING = {"rpe": None, "pairs": {}, "outputs": ["energy", "displacement"]}
INITIAL = {"outputs": ["energy", "energy_initial"]}
FORCES = {"outputs": ["energy", "forces"]}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"loss": {"displacement_weight": 1.0}}, "loss.displacement_weight"),
        ({"model": MOVING, "loss": {"displacement_weight": 0.0}}, "loss.displacement_weight"),
        ({"model": INITIAL, "loss": {"energy_initial_weight": 0.0}}, "loss.energy_initial_weight"),
        ({"loss": {"displacement_final_weight": 0.1}}, "loss.displacement_final_weight"),
        ({"loss": {"forces_weight": 1.0}}, "loss.forces_weight"),
        ({"model": FORCES, "loss": {"forces_weight": 0.0}}, "loss.forces_weight"),
        ({"model": FORCES, "training": {"noise": 0.1}}, "training.noise"),
        ({"model": FORCES, "training": {"interpolation": 0.1}}, "training.interpolation"),
        ({"model": FORCES, "training": {"compile": True}}, "training.compile"),
        ({"loss": {"recycle_weights": [0.0]}}, "loss.recycle_weights"),
        ({"model": INITIAL, "training": {"noise": 0.1}}, "training.noise"),
        ({"model": INITIAL, "training": {"interpolation": 1.0}}, "training.interpolation"),
        ({"data": {"energy": "y_init"}, "training": {"noise": 0.1}}, "training.noise"),
        ({"model": {"attention": "exact", "feature_map": "softplus"}}, "model.feature_map"),
        ({"model": {"attention": "exact", "feature_map": "learned_relu"}}, "model.feature_map"),
        ({"model": {"seed": 2**62}, "training": {"seed": 2**62}}, "training.seed"),
        ({"finetune": {"freeze": ["head"]}}, "finetune.freeze"),
        ({"data": {"validation_fraction": 1.0}}, "validation_fraction"),
        (
            {"data": {"validation_fraction": 0.5, "paths": {"val_id": "a"}}},
            "data.validation_fraction",
        ),
    ],
)
def test_what_does_not_go_together(settings, name):
    with pytest.raises(ValueError, match=name):
        RunConfig.model_validate(settings)


def test_what_goes_together():
    RunConfig.model_validate({"model": INITIAL, "training": {"interpolation": 0.5}})
    decaying = {"displacement_decay": "linear", "displacement_final_weight": 0.5}
    RunConfig.model_validate({"model": MOVING, "loss": {"displacement_weight": 0.0, **decaying}})
    RunConfig.model_validate({"model": {"recycles": 2}, "loss": {"recycle_weights": [0.0, 1.0]}})


def test_a_path_that_nothing_reads_is_warned_of():
    with pytest.warns(UserWarning, match=r"data\.paths\.trian.*data\.paths\.train"):
        DataConfig(name="emt_adsorption", paths={"trian": "a.lmdb"})
    with pytest.warns(UserWarning, match=r"data\.paths\.trian is not read$"):
        DataConfig(paths={"train": "a.lmdb", "trian": "b.lmdb"})
    DataConfig(name="emt_adsorption", paths={"train": "a.lmdb", "tests": "b.lmdb"})


def test_settings_in_python():
    config = RunConfig(
        data=DataConfig(paths={"train": "a"}),
        model=EnergyConfig(embed_dim=16),
        training=TrainingConfig(epochs=1),
        loss=LossConfig(recycle_weights=[1.0]),
        finetune=FinetuneConfig(),
    )
    assert RunConfig.model_validate(config.model_dump()) == config
    assert RunConfig().data.paths is not RunConfig().data.paths
