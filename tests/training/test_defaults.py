"""The order of a run's defaults: nothing that is set may be lost without a word."""

import pytest

from flt_mol.models import PairConfig, named_config
from flt_mol.training.config import load_run_config


def write(folder, text, name="mine.yaml"):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


GOOD = [
    "[run_schema, {model: flt-small}, _self_]",
    "[run_schema, {model: flt-small}, {data: emt_adsorption}, _self_]",
    "[run_schema, model/flt-small, _self_]",
    "[run_schema, {model: [flt-base, flt-small]}, _self_]",
]


@pytest.mark.parametrize("defaults", GOOD)
def test_the_named_model_is_trained_with_what_the_file_sets(defaults, tmp_path):
    file = write(
        tmp_path, f"defaults: {defaults}\nmodel: {{pairs: {{cutoff: 4.0}}, recycles: 2}}\n"
    )
    model = load_run_config(file).model
    expected = named_config("flt-small")
    expected.pairs.cutoff, expected.recycles = 4.0, 2
    assert model == expected


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (
            "[{model: flt-small}, run_schema, _self_]",
            r"must begin with 'run_schema', which takes the place of all before it: {model: flt-sm",
        ),
        (
            "[{model: flt-small}, {data: emt_adsorption}, run_schema, _self_]",
            "all before it: {model: flt-small}, {data: emt_adsorption}; write defaults: ",
        ),
        ("[_self_, run_schema]", "must begin with 'run_schema'"),
        (
            "[{model: flt-small}, _self_]",
            r"must begin with 'run_schema'; write defaults: \[run_sch",
        ),
        ("[]", "must begin with 'run_schema'"),
        (
            "[run_schema, _self_, {model: flt-small}]",
            r"in its defaults {model: flt-small} comes after _self_ and would take the place of "
            r"what the file itself sets: put _self_ last, defaults: "
            r"\[run_schema, {model: flt-small}, _self_\]$",
        ),
        (
            "[run_schema, {model: flt-small}, _self_, {data: emt_adsorption}]",
            r"{data: emt_adsorption} comes after .*: \[run_schema, {model: flt-small}, {data: emt_",
        ),
        ("{model: flt-small}", "defaults must be a list"),
        ("run_schema", "defaults must be a list"),
        (
            "[run_schema, {model: flt-small}, {model: flt-base}, _self_]",
            "Multiple values for model",
        ),
    ],
)
def test_an_order_that_loses_settings_is_refused(defaults, message, tmp_path):
    file = write(tmp_path, f"defaults: {defaults}\ntraining: {{epochs: 2}}\n")
    with pytest.raises(ValueError, match=f"mine.yaml: .*{message}"):
        load_run_config(file)


def test_a_file_that_begins_with_another_run(tmp_path):
    schema = "[run_schema, {model: flt-small}, _self_]"
    write(tmp_path, f"defaults: {schema}\nmodel: {{recycles: 2}}\n", "base.yaml")
    mine = write(tmp_path, "defaults: [base, _self_]\nmodel: {pairs: {cutoff: 4.0}}\n")
    model = load_run_config(mine).model
    assert (model.recycles, model.pairs.cutoff, model.far_blocks) == (2, 4.0, 1)
    write(
        tmp_path,
        "defaults: [run_schema, _self_, {model: flt-small}]\nmodel: {recycles: 2}\n",
        "base.yaml",
    )
    with pytest.raises(ValueError, match=r"in the defaults of base.yaml {model: flt-small} comes "):
        load_run_config(mine)
    write(tmp_path, f"defaults: {schema}\ntraining: {{loggers: csv}}\n", "base.yaml")
    with pytest.raises(ValueError, match="training.loggers is 'csv', expected a list"):
        load_run_config(mine)


def test_a_model_of_ones_own(tmp_path):
    write(tmp_path, "defaults: [flt-small, _self_]\nrecycles: 2\n", "model/own.yaml")
    mine = write(tmp_path, "defaults: [run_schema, {model: own}, _self_]\n")
    assert load_run_config(mine).model.recycles == 2
    write(tmp_path, "defaults: [_self_, flt-small]\nrecycles: 2\n", "model/own.yaml")
    with pytest.raises(ValueError, match="the defaults of model/own.yaml {model: flt-small} comes"):
        load_run_config(mine)


def test_a_model_added_on_the_command_line_does_not_undo_the_files(tmp_path):
    bare = write(tmp_path, "defaults: [run_schema, _self_]\ntraining: {epochs: 2}\n", "bare.yaml")
    assert load_run_config(bare, ["+model=flt-small"]).model == named_config("flt-small")
    own = write(tmp_path, "defaults: [run_schema, _self_]\nmodel: {pairs: {cutoff: 4.0}}\n")
    assert load_run_config(own).model.pairs == PairConfig(cutoff=4.0)
    message = (
        r"'\+model=flt-small' would come after what mine.yaml sets under model, and take its p"
    )
    with pytest.raises(ValueError, match=message):
        load_run_config(own, ["+model=flt-small"])
    own = write(tmp_path, "defaults: [run_schema, _self_]\ndata: {energy: y}\n")
    assert load_run_config(own, ["+model=flt-small"]).data.energy == "y"
    with pytest.raises(ValueError, match=r"before _self_ in its defaults"):
        load_run_config(own, ["+data=emt_adsorption"])


@pytest.mark.parametrize(
    "override", ["hydra.run.dir=x", "hydra/job_logging=none", "+hydra.x=3", "~hydra", "hydra=x"]
)
def test_what_hydra_itself_would_be_told_has_no_effect(override, tmp_path):
    with pytest.raises(ValueError, match="has no effect: .*; output=FOLDER says where a run goes"):
        load_run_config("emt_small", [override])
    file = write(tmp_path, "defaults: [run_schema, _self_]\nhydra: {run: {dir: x}}\n")
    with pytest.raises(ValueError, match="no effect here: take 'hydra' out"):
        load_run_config(file)
