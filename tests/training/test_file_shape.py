"""Values of another shape than the schema's, in a run's file and on the command line."""

import re
import warnings

import pytest

from flt_mol.training.checks import check_run
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig, load_run_config

MAPPING = r"expected a mapping of its settings, {key: value}"
LIST = r"expected a list, \[a, b\]"
NUMBERS = r"expected a list of numbers, \[1, 2\], or null$"
TEXTS = "expected a mapping of texts, {split: path}$"

WRONG = [
    ("model: {outputs: {energy: true}}", rf"model.outputs is {{'energy': True}}, {LIST}$"),
    ("model: {outputs: energy}", f"model.outputs is 'energy', {LIST}$"),
    ("model: {outputs: [null]}", rf"model.outputs is \[None\], {LIST}$"),
    ("model: {outputs: [[energy]]}", LIST),
    ("model: {outputs: null}", f"model.outputs is empty or null, {LIST}; or leave it out$"),
    ("loss: {pass_weights: [1, x]}", rf"loss.pass_weights is \[1, 'x'\], {NUMBERS}"),
    ("loss: {pass_weights: {a: 1}}", NUMBERS),
    ("loss: {pass_weights: 1}", f"loss.pass_weights is 1, {NUMBERS}"),
    ("loss: {pass_weights: [1, true]}", NUMBERS),
    ("loss: {pass_weights: [1, null]}", NUMBERS),
    (
        "model: flt-base",
        f"model is 'flt-base', {MAPPING}; a named model is chosen in the defaults: "
        r"\[run_schema, {model: flt-base}, _self_\]$",
    ),
    ("model: [flt-base]", f"{MAPPING}$"),
    ("model: null", f"model is empty or null, {MAPPING}; or leave it out$"),
    ("data: emt_adsorption", f"{MAPPING}; a named data set is chosen in the defaults: "),
    ("finetune: emt_small", f"{MAPPING}; to start from a .*, finetune: {{checkpoint: emt_small}}$"),
    ("finetune: {checkpoint: [a]}", r"finetune.checkpoint is \['a'\], expected a text or null$"),
    ("training:", f"training is empty or null, {MAPPING}; or leave it out$"),
    ("training: fast", f"training is 'fast', {MAPPING}$"),
    ("training: {epochs: [1]}", r"training.epochs is \[1\], expected a whole number$"),
    ("training: {epochs: null}", "training.epochs is empty or null, expected a whole number; or l"),
    ("training: {loggers: csv}", f"training.loggers is 'csv', {LIST}$"),
    ("data: {evaluation: {val_id: x}}", LIST),
    ("data: {paths: {train: [a, b]}}", TEXTS),
    ("data: {paths: {train: null}}", TEXTS),
    ("data: {paths: [a]}", TEXTS),
    ("model: {rpe: true}", f"model.rpe is True, {MAPPING}, or null$"),
    ("model: {pairs: {cutoff: {a: 1}}}", "model.pairs.cutoff is {'a': 1}, expected a number$"),
    ("model.seed: 3", "'model.seed' is one key with dots: in a file it is model: {seed: 3}$"),
    ("model.rpe.split: one_sided", "in a file it is model: {rpe: {split: one_sided}}$"),
    ("null: 3", "unknown key 'None'; known here: data, model"),
    ("model: {rpe: {nums: 3}}", "unknown key 'model.rpe.nums'; did you mean 'model.rpe.num_terms'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_shapes_in_a_file(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [run_schema, {{model: emt_small}}, _self_]\n{text}\n")
    with pytest.raises(ValueError, match=f"mine.yaml: .*{message}"):
        load_run_config(str(file))


def test_what_only_looks_wrong_passes(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [run_schema, {model: emt_small}, _self_]\n"
        "model: {recycles: 2, spectral: null, pairs: {}}\n"
        'loss: {pass_weights: [1e-3, "${training.epochs}"]}\n'
        "training: {learning_rate: 1e-3, loggers: [], "
        "accumulate: '${training.epochs}', epochs: 3}\n"
        "data: {paths: {train: 3}}\noutput: 7\n"
    )
    config = load_run_config(str(file))
    assert config.loss.pass_weights == [1e-3, 3]
    assert (config.training.learning_rate, config.training.accumulate) == (1e-3, 3)
    assert config.model.pairs is not None
    assert (config.output, config.data.paths["train"]) == ("7", str(tmp_path / "3"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.outputs={energy: true}", r": expected a list, \[a,b\]$"),
        ("loss.pass_weights={a: 1}", r": expected a list, \[a,b\]$"),
        ("loss.pass_weights=[1,x]", "Value 'x' .* could not be converted to Float$"),
        ("model.outputs=[energy,null]", ": null is no value here$"),
        ("training=[1]", ": expected a mapping {key: value}$"),
        ("model.rpe=[1]", ": expected a mapping {key: value}$"),
        ("data.paths=x", "expected a mapping of texts, {key: text}$"),
        ("data.paths={train: [a]}", r"data.paths.train is \['a'\], expected a path$"),
        ("data.evaluation=[[a]]", r"data.evaluation is \[\['a'\]\], expected a list of splits$"),
    ],
)
def test_shapes_on_the_command_line(override, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("emt_small", [override])


@pytest.mark.parametrize("part", ["data", "model", "training", "loss", "finetune"])
def test_parts_of_a_run_in_python(part):
    kind = type(getattr(RunConfig(), part)).__name__
    for value, found in (({}, "dict"), (None, "NoneType"), ("flt-small", "str")):
        with pytest.raises(
            ValueError, match=rf"^{part} is a {found}, expected a {kind}: {kind}\(…"
        ):
            check_run(RunConfig(**{part: value}))


def test_data_in_python_are_checked_too():
    with pytest.raises(ValueError, match="data.skip_bad is 'no', expected true or false"):
        check_run(RunConfig(data=DataConfig(skip_bad="no")))
    with pytest.raises(ValueError, match="data.evaluation is 'val_id', expected a list of splits"):
        check_run(RunConfig(data=DataConfig(evaluation="val_id")))


def test_a_path_that_nothing_reads_is_warned_of():
    """Training would go on, on the data set's own split."""

    def data(paths, name="emt_adsorption", **changes):
        return RunConfig(data=DataConfig(name=name, paths=paths, **changes))

    message = "data.paths.{} is not read: '{}' of emt_adsorption is; did you mean data.paths.{}?"
    for slip, split in (("trian", "train"), ("val", "val_id")):
        with pytest.warns(UserWarning, match=re.escape(message.format(slip, split, split))):
            check_run(data({slip: "x"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_run(data({"train": "x", "val_id": "y", "val_ood_ads": "z", "test": "t"}))
        check_run(data({"train": "x", "train_100k": "y"}))
        check_run(data({"trian": "x"}, name=None))  # refused when it is opened
        check_run(data({"val": "x"}, validation_fraction=0.1))
        check_run(RunConfig(training=TrainingConfig()))
