import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from flt_mol.analysis.accuracy.evaluation import evaluate
from flt_mol.analysis.accuracy.loop import Settings, seeded, train, without_denormals
from flt_mol.analysis.accuracy.report import entries, page, report, told
from flt_mol.analysis.accuracy.results import Results, fingerprint
from flt_mol.analysis.accuracy.rows import ROWS, Row, build, complete, count_weights, resolved
from flt_mol.analysis.accuracy.runs import Experiment, Job, Recipe, measure, missing, run, usable
from flt_mol.analysis.accuracy.table import Entry, Spread, cost_table, energy_table, moves_table
from flt_mol.analysis.accuracy.times import Clock, measure_times
from flt_mol.analysis.accuracy.verdict import Claim, Finding, findings, show
from flt_mol.models.config import EnergyConfig
from flt_mol.models.energy import Normalizer
from flt_mol.structures import Structures
from flt_mol.testing import random_structures
from flt_mol.testing.energy import (
    check_batch_equals_alone,
    check_permutation,
    check_rotation,
    check_translation,
)
from flt_mol.testing.structures import repeated

SMALL = {
    "schnet": {"width": 8, "num_blocks": 2, "num_gaussians": 12},
    "schnet_packaged": {"width": 8, "num_blocks": 2, "num_gaussians": 12},
    "visnet": {"width": 8, "num_blocks": 2, "num_gaussians": 12, "num_heads": 2, "lmax": 2},
    "dimenet++": {"width": 8, "num_blocks": 1, "num_radial": 3, "num_spherical": 2},
}
TINY = Row(
    "tiny",
    {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "ffn_dim": 8, "num_features": 4,
     "rpe": None, "pairs": {"cutoff": 4.0, "num_basis": 4, "density": False}},
)  # fmt: skip
TRAINED = Settings(epochs=2, batch_size=4)


@pytest.fixture(scope="module")
def rivals():
    """Small rivals with outputs of the size of 1 eV, built once: DimeNet++ takes seconds."""
    pytest.importorskip("torch_geometric")
    from flt_mol.analysis.accuracy.rivals import RIVALS

    models = {}
    with seeded(0):
        for name, settings in SMALL.items():
            model = RIVALS[name](cutoff=4.0, **settings)
            for parameter in model.parameters():
                if not parameter.any():  # DimeNet++ begins with zeros everywhere
                    nn.init.normal_(parameter, std=0.3)
            models[name] = model
    return models


def initial_of(model):
    """The other output, for checks that look at "energy"."""
    return lambda structures: model(structures)["energy_initial"]


def small_cells(natoms=(1, 2, 6), periodic=(True, True, False)):
    """Cells of 2 to 4 Å: within 4 Å atoms see images of themselves."""
    generator = torch.Generator().manual_seed(1)
    return random_structures(generator, natoms, periodic, spacing=1.9, dtype=torch.float64)


def systems(count=9, initial=True):
    """Single systems, whose energies depend on what atoms they have."""
    generator = torch.Generator().manual_seed(2)
    batch = random_structures(generator, [3 + i % 3 for i in range(count)])
    weights = batch.atomic_numbers.double() / 40
    energy = torch.stack([weights[batch.system == b].sum() for b in range(count)])
    batch = replace(batch, energy=energy, energy_initial=2 - energy if initial else None)
    return [system.with_pairs(4.0) for system in batch]


# Rivals


@pytest.mark.parametrize("name", list(SMALL))
def test_rivals_see_images_and_themselves_among_them(rivals, name):
    """A supercell has all images of the first cell as atoms of its own: energies are multiples."""
    structures = small_cells()
    larger, times = repeated(structures, (2, 3, 2))
    pairs = structures.with_pairs(4.0).pairs
    assert (pairs.index_i == pairs.index_j).sum() > 10
    before, after = rivals[name](structures), rivals[name](larger)
    for key in ("energy", "energy_initial"):
        assert before[key].std() > 1e-2
        torch.testing.assert_close(after[key], before[key] * times, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(SMALL))
def test_rivals_keep_what_energies_keep(rivals, name):
    structures, model = small_cells(natoms=(3, 1, 5)), rivals[name]
    moves = torch.tensor([[1, -2, 0], [0, 3, 0], [-1, 0, 0]]).repeat(3, 1).double()
    shifts = (moves[:, :, None] * structures.cell[structures.system]).sum(1)
    moved = replace(structures, positions=structures.positions + shifts)
    for output in (model, initial_of(model)):
        check_permutation(output, structures)
        check_translation(output, structures, distance=20)
        check_rotation(output, structures)
        check_batch_equals_alone(output, structures, tolerance=1e-4, larger=3)
    torch.testing.assert_close(model(moved)["energy"], model(structures)["energy"])


@pytest.mark.parametrize("name", list(SMALL))
def test_rivals_use_pairs_that_come_along_if_they_are_theirs(rivals, name, monkeypatch):
    structures = small_cells()
    expected = rivals[name](structures)["energy"]
    torch.testing.assert_close(rivals[name](structures.with_pairs(6.0))["energy"], expected)
    ready = structures.with_pairs(4.0)
    monkeypatch.setattr(Structures, "with_pairs", None)
    torch.testing.assert_close(rivals[name](ready)["energy"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", list(SMALL))
def test_rivals_tell_tags_apart(rivals, name):
    structures = small_cells()
    other = replace(structures, tags=(structures.tags + 1) % 3)
    assert (rivals[name](other)["energy"] - rivals[name](structures)["energy"]).abs().min() > 1e-4


def test_only_angles_tell_these_apart(rivals):
    """Two neighbours at one distance, farther apart than the cutoff: bent or straight."""
    bent, straight = (
        Structures.single([1, 8, 1], [[3.0, 0, 0], [0, 0, 0], third], tags=[2, 2, 2])
        for third in ([-3 * math.cos(0.5), 3 * math.sin(0.5), 0], [-3.0, 0, 0])
    )
    for name, knows in (("schnet", False), ("dimenet++", True), ("visnet", True)):
        apart = (rivals[name](bent)["energy"] - rivals[name](straight)["energy"]).abs().item()
        assert apart > 1e-5 if knows else apart < 1e-6, name


def test_triplets_are_all_ways_but_the_way_back(rivals):
    from flt_mol.analysis.accuracy.rivals import triplets

    structures = small_cells(natoms=(2, 4)).with_pairs(4.0)
    pairs = structures.pairs
    listed = list(zip(*(x.tolist() for x in pairs), strict=True))
    expected = {
        (a, b)
        for a, (i, j, shift) in enumerate(listed)
        for b, (via, k, more) in enumerate(listed)
        if via == j and not (k == i and all(s + m == 0 for s, m in zip(shift, more, strict=True)))
    }
    first, second = triplets(pairs, structures.num_atoms)
    assert len(first) == len(expected)
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == expected
    assert any(listed[a][0] == listed[b][1] for a, b in expected)  # another image of itself


def test_schnet_reads_features_out_as_they_are(rivals):
    """Nothing between blocks and read-out takes the size of features away."""
    head, x = rivals["schnet"].head, torch.randn(2, 8)
    tags, ptr = torch.tensor([2, 2]), torch.tensor([0, 2])
    assert (head(1000 * x, tags, ptr) - head(x, tags, ptr)).abs().min() > 1


def test_a_missing_package_is_named(monkeypatch):
    from flt_mol.analysis.accuracy.rivals import SchNet

    monkeypatch.setitem(sys.modules, "torch_geometric.nn.models.schnet", None)
    with pytest.raises(ImportError, match=r"pip install 'flt_mol\[pyg\]'"):
        SchNet()


# The loop


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def tiny(seed=0, targets="joint"):
    return lambda: build(TINY, resolved(TINY, targets), seed)


def test_the_loop_repeats_itself_for_a_seed_and_leaves_global_state_alone():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = train(tiny(), systems(), TRAINED, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.randn(5)
    again = train(tiny(), systems(), TRAINED, seed=3)
    assert torch.equal(weights_of(first.model), weights_of(again.model))
    assert first.loss == again.loss
    other = train(tiny(), systems(), TRAINED, seed=4)
    assert not torch.equal(weights_of(first.model), weights_of(other.model))


class Listening(nn.Module):
    """Predicts 0, and notes which systems it was shown."""

    cutoff = None

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))
        self.normalizer, self.normalizer_initial = Normalizer(), Normalizer()
        self.seen = []

    def forward(self, structures):
        self.seen.append(structures.sid)
        out = self.zero * torch.ones(len(structures))
        return {"energy": out, "energy_initial": out}


def test_all_rows_see_the_same_batches_whatever_they_draw():
    def drawing():
        torch.randn(100)
        return Listening()

    seen = [train(each, systems(9), TRAINED, 1).model.seen for each in (Listening, drawing)]
    assert seen[0] == seen[1]
    assert [len(batch) for batch in seen[0]] == [4] * 4  # one of nine waits in each epoch
    assert seen[0][:2] != seen[0][2:]


def test_the_loss_is_the_mean_of_both_normalised_errors():
    found = train(Listening, systems(8), Settings(epochs=1, batch_size=8, learning_rate=0.0), 0)
    shown = Structures.cat(systems(8))
    parts = [
        energy.abs().mean() / energy.std(correction=0)
        for energy in (shown.energy, shown.energy_initial)
    ]
    assert found.loss == pytest.approx(sum(parts).item() / 2, rel=1e-5)


class Moving(Listening):
    """Also says that nothing moves."""

    def forward(self, structures):
        return super().forward(structures) | {"displacement": self.zero * structures.positions}


@pytest.mark.parametrize("targets", ["joint", "relaxed", "initial"])
@pytest.mark.parametrize(
    ("loss", "start", "end"),
    [({}, 1.0, 1.0), ({"displacement_weight": 3.0}, 3.0, 3.0),
     ({"displacement_weight": 3.0, "displacement_decay": "linear",
       "displacement_final_weight": 2.0}, 3.0, 2.0)],
)  # fmt: skip
def test_the_weight_of_displacements_is_what_it_says_whatever_the_targets(
    targets, loss, start, end
):
    settings = Settings(targets, epochs=2, batch_size=8, learning_rate=0.0)
    still, moving = (train(each, systems(8), settings, 0, each is Moving and loss).loss
                     for each in (Listening, Moving))  # fmt: skip
    shown = Structures.cat(systems(8))
    length = (shown.positions_relaxed - shown.positions)[~shown.fixed].norm(dim=-1).mean().item()
    # The mean over the last of two epochs, each of one step.
    weight = 0.5 * (start + end)
    assert moving - still == pytest.approx(weight * length, rel=1e-4)


def test_weights_of_an_output_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="no output displacement"):
        train(Listening, systems(8), TRAINED, 0, {"displacement_weight": 1.0})


def test_single_targets_need_no_others_and_are_what_they_are_called():
    relaxed = Settings("relaxed", epochs=1, batch_size=4)
    model = train(tiny(targets="relaxed"), systems(initial=False), relaxed, 0).model
    assert set(evaluate(model, systems(), "relaxed")) == {"energy"}
    initial = replace(relaxed, targets="initial")
    trained = train(tiny(targets="initial"), systems(), initial, 0).model
    shown = Structures.cat(systems())
    assert trained.normalizer.mean.item() == pytest.approx(shown.energy_initial.mean().item())
    error = (trained(shown)["energy"] - shown.energy_initial).abs().mean().item()
    found = evaluate(trained, systems(), "initial")
    assert set(found) == {"energy_initial"}
    assert found["energy_initial"]["mae"] == pytest.approx(error, rel=1e-5)


def test_training_brings_the_error_down():
    settings = Settings(epochs=60, batch_size=8, learning_rate=1e-2)
    before = train(tiny(), systems(8), replace(settings, epochs=1, learning_rate=0.0), 0).model
    after = train(tiny(), systems(8), settings, 0).model
    for target in ("energy", "energy_initial"):
        start, end = (evaluate(m, systems(8), "joint")[target]["mae"] for m in (before, after))
        assert end < 0.5 * start


def test_a_loss_that_is_not_finite_ends_training():
    with pytest.raises(ValueError, match="the loss of epoch 1 is nan"):
        train(tiny(), systems(), replace(TRAINED, learning_rate=math.inf), 0)


def test_settings_that_are_none():
    with pytest.raises(ValueError, match="known: joint, relaxed, initial"):
        Settings("both")
    with pytest.raises(ValueError, match="epochs is 0"):
        Settings(epochs=0)
    with pytest.raises(ValueError, match="no systems"):
        train(tiny(), [], TRAINED, 0)
    with pytest.raises(ValueError, match="no energy_initial for sid 0"):
        train(tiny(), systems(initial=False), TRAINED, 0)


class Known(nn.Module):
    """Says of two passes what errors they have."""

    def forward(self, structures):
        energy = torch.stack([structures.energy + 0.3, structures.energy + 0.01])
        moves = structures.positions_relaxed - structures.positions
        off = torch.tensor([0.0, 3.0, 4.0])
        every = torch.stack([moves * 0, moves + off])
        every[:, structures.fixed] = 100.0
        return {"energy": energy[-1], "energy_passes": energy,
                "displacement": every[-1], "displacement_passes": every}  # fmt: skip


def test_errors_by_pass_and_of_free_atoms_alone():
    shown = systems(70)
    found = evaluate(Known(), shown, "relaxed")
    assert found["energy"]["mae_by_pass"] == pytest.approx([0.3, 0.01], abs=1e-6)
    assert found["energy"]["mae"] == pytest.approx(0.01, abs=1e-6)
    assert found["energy"]["ewt"] == 1.0
    batch = Structures.cat(shown)
    stay = (batch.positions_relaxed - batch.positions)[~batch.fixed].norm(dim=-1).mean().item()
    assert found["displacement"]["stay"] == pytest.approx(stay, rel=1e-5)
    assert found["displacement"]["error_by_pass"] == pytest.approx([stay, 5.0], rel=1e-5)


def test_denormals_are_flushed_within_and_as_before_afterwards():
    def flushed():
        return bool(torch.full((1,), 1e-39).mul(0.5) == 0)

    before = flushed()
    with without_denormals():
        assert flushed()
        with without_denormals():
            pass
        assert flushed()
    assert flushed() == before


# Results


def test_a_torn_last_line_is_left_out_and_the_next_begins_afresh(tmp_path):
    results = Results(tmp_path / "deep" / "results.jsonl")
    assert results.read() == []
    results.append({"row": "a", "seed": 0})
    with results.path.open("ab") as file:
        file.write(b'{"row": "a", "se')
    assert results.read() == [{"row": "a", "seed": 0}]
    results.append({"row": "a", "seed": 1})
    assert results.find(row="a") == [{"row": "a", "seed": 0}, {"row": "a", "seed": 1}]
    assert len(results.path.read_bytes().splitlines()) == 3


def test_the_last_of_several_lines_counts_and_nothing_infinite_is_kept(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for value in (1, 2):
        results.append({"row": "a", "seed": 0, "value": value})
    results.append({"row": "b", "seed": 0})
    assert results.find(row="a") == [{"row": "a", "seed": 0, "value": 2}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.append({"row": "a", "value": math.nan})
    assert len(results.read()) == 3


@pytest.mark.parametrize("seed", ["x", None, 0.5])
def test_a_line_with_a_foreign_seed_is_named(tmp_path, seed):
    results = Results(tmp_path / "results.jsonl")
    results.append({"row": "a", "seed": 0})
    with results.path.open("ab") as file:
        file.write(b"[1]\n\n")
    results.append({"row": "b", "seed": seed})
    assert results.find(row="a") == [{"row": "a", "seed": 0}]
    with pytest.raises(ValueError, match=rf"results.jsonl, line 4: seed is {seed!r}, expected"):
        results.find(row="b")


def experiment(**changes):
    rows = {
        "tiny": TINY,
        "none": replace(TINY, label="none", config={**TINY.config, "pairs": None}),
    }
    return Experiment(rows, replace(TRAINED, epochs=1), Recipe(limit=8), **changes)


def test_another_setting_is_another_result():
    base, lossy = experiment(), replace(TINY, loss={"pass_weights": [1.0]})
    hashes = {
        base.key("tiny")["hash"],
        base.key("none")["hash"],
        base._replace(settings=TRAINED).key("tiny")["hash"],
        base._replace(corpus=Recipe()).key("tiny")["hash"],
        base._replace(rows={"tiny": lossy}).key("tiny")["hash"],
    }
    assert len(hashes) == 5
    assert experiment().key("tiny") == base.key("tiny")
    relabelled = base._replace(rows={"tiny": replace(TINY, label="another label")})
    assert relabelled.key("tiny") == base.key("tiny")
    with pytest.raises(ValueError, match="no row 'tinny'; known: tiny, none"):
        base.key("tinny")


def test_results_know_defaults_and_code(monkeypatch):
    """A setting that nobody wrote down counts as much as one that is written down."""
    before = experiment().key("tiny")["hash"]
    said = replace(TINY, config={**TINY.config, "dropout": 0.0, "ffn_dim": 8}, loss={
        "displacement_decay": "none"})  # fmt: skip
    assert experiment()._replace(rows={"tiny": said}).key("tiny")["hash"] == before
    rows, rival = {"tiny": Row("SchNet", {"width": 8}, "schnet")}, {"width": 8, "num_blocks": 3}
    expected = experiment()._replace(rows=rows).key("tiny")
    rows = {"tiny": Row("SchNet", rival, "schnet")}
    assert experiment()._replace(rows=rows).key("tiny") == expected

    from flt_mol.analysis.accuracy import runs

    with monkeypatch.context() as patch:
        patch.setattr(runs, "FORMAT", runs.FORMAT + 1)
        assert experiment().key("tiny")["hash"] != before
    defaults = EnergyConfig.__init__.__defaults__
    changed = tuple("mean" if value == "tags" else value for value in defaults)
    assert changed != defaults
    monkeypatch.setattr(EnergyConfig.__init__, "__defaults__", changed)
    assert experiment().key("tiny")["hash"] != before


def test_settings_that_no_model_knows_make_a_row_unusable():
    rows = {
        "ours": replace(TINY, config={"embed_dimension": 8}),
        "theirs": Row("SchNet", {"wide": 8}, "schnet"),
    }
    found, reasons = usable(experiment()._replace(rows=rows), list(rows))
    assert found == []
    assert "unknown model setting embed_dimension" in reasons["ours"]
    assert "'wide'" in reasons["theirs"]


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    results, about = Results(tmp_path / "results.jsonl"), experiment()
    assert missing(about, results, ["tiny", "none"], [0, 1]) == [
        Job("tiny", 0), Job("none", 0), Job("tiny", 1), Job("none", 1)
    ]  # fmt: skip
    stopped = run(about, results, missing(about, results, ["tiny", "none"], [0, 1]))
    job, record = next(stopped)
    stopped.close()
    assert job == Job("tiny", 0)
    assert results.read() == [json.loads(json.dumps(record))]
    with results.path.open("ab") as file:
        file.write(b'{"torn')
    todo = missing(about, results, ["tiny", "none"], [0, 1])
    assert Job("tiny", 0) not in todo
    assert len(todo) == 3
    assert missing(about._replace(settings=TRAINED), results, ["tiny"], [0]) == [Job("tiny", 0)]
    again = measure(about, Job("tiny", 0))
    assert again["splits"] == record["splits"]
    assert "val_ood_both" in record["splits"]
    assert told(record).startswith("val_id energy ")


def test_a_row_that_fails_does_not_keep_others_from_their_turn(tmp_path):
    bad = replace(TINY, loss={"pass_weights": [1.0, 2.0]})
    about = experiment()._replace(rows={"bad": bad, "tiny": TINY})
    results = Results(tmp_path / "results.jsonl")
    found = dict(run(about, results, [Job("bad", 0), Job("tiny", 0)]))
    assert "pass_weights has 2 weights" in told(found[Job("bad", 0)])
    assert [record["row"] for record in results.read()] == ["tiny"]


# Rows


def test_every_row_of_ours_can_be_built_and_says_both_energies():
    structures = small_cells()
    for name, row in ROWS.items():
        if row.rival is None:
            model = build(row, resolved(row, "joint"))
            assert {"energy", "energy_initial"} <= set(model(structures)), name
            assert resolved(row, "relaxed")["outputs"][0] == "energy"


OTHER = {
    "embed_dim": 16, "num_heads": 4, "num_layers": 2, "recycles": 2, "ffn_dim": 12,
    "num_features": 6, "redraw_every": 2, "attention": "exact", "dropout": 0.1,
    "rpe": {"num_frequencies": 3},
    "seed": 5, "far_scale": 0.5, "far_blocks": 1, "feature_map": "relu",
    "spectral": {"k_max": 0.3}, "pairs": None, "images": {"cutoff": 3.0}, "readout": "sum",
    "head_norm": False, "outputs": ["energy", "displacement"], "feedback": "positions",
}  # fmt: skip


@pytest.mark.parametrize("name", list(EnergyConfig.__dataclass_fields__))
def test_a_row_may_set_any_key_of_a_model(name):
    more = {"outputs": OTHER["outputs"], "recycles": 2} if name == "feedback" else {}
    if name == "images":  # they are for exact attention
        more = {"attention": "exact", "pairs": None}
    row = replace(TINY, config={**TINY.config, **more, name: OTHER[name]})
    config = resolved(row, "joint")
    model, key = build(row, config, seed=3), experiment()._replace(rows={"tiny": row}).key("tiny")
    expected = EnergyConfig.from_dict({**TINY.config, **more, name: OTHER[name]})
    wanted = getattr(expected, name)
    if name == "outputs":
        wanted = ["energy", "energy_initial", "displacement"]
    assert getattr(model.config, name) == wanted
    assert getattr(EnergyConfig.from_dict(complete(row, config)), name) == wanted
    assert key["hash"] != experiment().key("tiny")["hash"]
    assert wanted != getattr(EnergyConfig.from_dict({**resolved(TINY, "joint"), **more}), name) or (
        name in more
    )


def test_settings_that_came_later_count_only_where_they_are_set():
    config = {"rpe": None, "spectral": {"num_heads": 2}}
    assert set(complete(ROWS["ours"], config)["spectral"]) == {
        "num_heads", "k_max", "sigma_max", "num_basis", "padding",
    }  # fmt: skip
    assert "redraw_every" not in complete(ROWS["ours"], config)
    config = {"rpe": None, "redraw_every": 5, "spectral": {"max_vectors": 9}}
    assert complete(ROWS["ours"], config)["spectral"]["max_vectors"] == 9
    assert complete(ROWS["ours"], config)["redraw_every"] == 5


def test_parts_are_taken_out_of_ours_one_by_one():
    ours = complete(ROWS["ours"], resolved(ROWS["ours"], "joint"))
    pairs = ours["pairs"]
    for name, without in {
        "ours_attention": {"attention": "auto"},
        "ours_far": {"attention": "auto", "far_blocks": None},
        "ours_no_spectral": {"spectral": None},
        "ours_no_vectors": {"pairs": {**pairs, "filter_vectors": 0}},
        "ours_norm": {"pairs": {**pairs, "norm": True}},
        "ours_head_norm": {"head_norm": True},
        "ours_auxiliary": {"outputs": ["energy", "energy_initial", "displacement"]},
    }.items():
        config = complete(ROWS[name], resolved(ROWS[name], "joint"))
        assert config == {**ours, **without}, name


def test_exact_attention_as_large_as_ours_has_its_blocks_and_at_least_its_weights():
    ours, exact = (
        build(ROWS[name], resolved(ROWS[name], "joint")) for name in ("ours", "graphormer4")
    )
    assert len(exact.encoder.blocks) == len(ours.encoder.blocks)
    assert 1 <= count_weights(exact) / count_weights(ours) < 1.05


def test_widths_are_found_without_anybodys_random_numbers(rivals):
    rows = {"tiny": TINY, "schnet": Row("SchNet", {"num_blocks": 1}, "schnet", match="tiny")}
    about, state = experiment()._replace(rows=rows), torch.get_rng_state()
    about.key("schnet")
    assert torch.equal(torch.get_rng_state(), state)
    measure(about._replace(corpus=Recipe(limit=4, splits=("train", "val_id"))), Job("schnet", 1))
    assert torch.equal(torch.get_rng_state(), state)


def test_rivals_get_as_many_weights_as_the_row_they_are_matched_to(rivals):
    rows = {"tiny": TINY, "schnet": Row("SchNet", {"num_blocks": 2}, "schnet", match="tiny")}
    wanted = count_weights(build(TINY, resolved(TINY, "joint")))
    config = resolved(rows["schnet"], "joint", rows)
    width = config["width"]
    from flt_mol.analysis.accuracy.rivals import RIVALS

    def weights(width):
        return count_weights(RIVALS["schnet"](width=width))

    assert weights(width - 2) < wanted <= weights(width)
    assert build(rows["schnet"], config).width == width


def test_rows_whose_package_is_missing_are_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn.models.schnet", None)
    rows = {"tiny": TINY, "schnet": replace(ROWS["schnet"], match="tiny")}
    from flt_mol.analysis.accuracy.rows import _width

    _width.cache_clear()
    found, reasons = usable(experiment()._replace(rows=rows), ["schnet", "tiny"])
    assert found == ["tiny"]
    assert "pip install" in reasons["schnet"]


# Tables and verdict


def record(energy, initial, seconds=1.0, seed=0, splits=("val_id", "ood"), weights=100, **more):
    errors = {"energy": {"mae": energy, "ewt": 0.25}, "energy_initial": {"mae": initial, "ewt": 0}}
    return {"seed": seed, "seconds_per_epoch": seconds, "parameters": 150, "weights": weights,
            "splits": {split: {**errors, **more} for split in splits}}  # fmt: skip


def test_spreads_are_sample_deviations_and_one_seed_has_none():
    assert Spread.of([0.1, 0.3]).show(3) == "0.200 ± 0.141"
    assert Spread.of([0.1]).show(2) == "0.10"
    assert Spread.of([]) is None


def test_tables_show_what_is_missing():
    rows = [
        Entry("ours", "ours", [record(0.1, 1.0, seed=0), record(0.3, 1.0, seed=1)]),
        Entry("schnet", "SchNet", [record(0.4, 2.0)]),
        Entry("none", "not yet", []),
    ]
    text = energy_table(rows, "energy", ["val_id", "ood", "elsewhere"])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert lines[0] == ["ours", "2", "0.2000 ± 0.1414 (25)", "0.2000 ± 0.1414 (25)", "–"]
    assert lines[1][1:3] == ["1", "0.4000 (25)"]
    assert lines[2] == ["not yet", "0", "–", "–", "–"]
    costs = cost_table(rows, ["energy"], "val_id", {"schnet": "SchNet", "absent": "?"})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in costs.splitlines()]
    assert lines[0] == [
        "row", "parameters", "weights", "s/epoch", "time / SchNet", "relaxed energy / SchNet"
    ]  # fmt: skip
    assert lines[2] == ["ours", "150", "100", "1.0 ± 0.0 *", "–", "0.50"]
    assert lines[4] == ["not yet", "–", "–", "–", "–", "–"]


def test_passes_and_moves_have_a_table_where_there_are_any():
    assert moves_table([Entry("a", "a", [record(1, 1)])], "val_id") is None
    moved = {"displacement": {"error": 0.2, "stay": 0.5, "error_by_pass": [0.4, 0.2]}}
    entry = Entry("a", "a", [record(1, 1, **moved)])
    entry.records[0]["splits"]["val_id"]["energy"]["mae_by_pass"] = [2.0, 1.0]
    still = Entry("b", "b", [record(1, 1, displacement={"error": 0.3, "stay": 0.5})])
    text = moves_table([entry, still], "val_id")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert lines == [
        ["a", "relaxed energy, eV", "", "2.0000", "1.0000"],
        ["a", "displacement, Å", "0.5000", "0.4000", "0.2000"],
        ["b", "displacement, Å", "0.5000", "0.3000", ""],
    ]


SPLITS = ("val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")


def claimed(ours=(0.06, 0.05), schnet=(0.07, 0.06), exact=(0.08, 0.12), seeds=5, gaussian=(9, 9),
            graphormer=(0.09, 0.13), **changes):  # fmt: skip
    """Rows with these errors everywhere."""
    settings = {"seconds": 1.0, "weights": 100, **changes}
    rows = {"ours": ours, "schnet": schnet, "schnet_packaged": (9.0, 9.0), "exact_images": exact,
            "exact_gaussian": gaussian, "graphormer": graphormer,
            "graphormer4": (9, 9)}  # fmt: skip
    return [
        Entry(
            name,
            name,
            [
                record(*errors, seed=seed, splits=SPLITS, **(settings if name == "ours" else {}))
                for seed in range(seeds)
            ],
        )
        for name, errors in rows.items()
    ]


MEASURED = "- Verdict with the exact attention that the bounds were set by: "
STRONGEST = "- Verdict with the strongest exact attention measured: "


def verdict(rows):
    """Both, without what they begin with."""
    *_, first, second = show(findings(rows)).splitlines()
    assert first.startswith(MEASURED)
    assert second.startswith(STRONGEST)
    return first.removeprefix(MEASURED), second.removeprefix(STRONGEST)


def failing(rows):
    return [finding.text for finding in findings(rows) if finding.holds is False]


def test_the_verdict_on_numbers_that_reach_it():
    assert verdict(claimed()) == ("reached.", "reached.")
    assert len(findings(claimed())) == 17


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"schnet": (0.05, 0.06)}, ["lower MAE than SchNet", "ahead of SchNet"]),
        ({"ours": (0.06, 0.0601), "schnet": (0.07, 0.06), "exact": (0.08, 0.1202)},
         ["lower MAE than SchNet", "ahead of SchNet"]),
        ({"exact": (0.07, 0.12)}, ["at most 0.85 × the exact", "at most 0.85 × the strongest"]),
        ({"exact": (0.08, 0.09)}, ["at most 0.5 × the exact", "at most 0.5 × the strongest"]),
        ({"seconds": 1.01}, ["time per epoch"]),
        ({"weights": 103}, ["no more weights"]),
    ],
)  # fmt: skip
def test_the_verdict_on_numbers_that_do_not(changes, texts):
    found = failing(claimed(**changes))
    assert len(found) == len(texts)
    for text, line in zip(texts, found, strict=True):
        assert text in line
    assert all(line.startswith("not reached") for line in verdict(claimed(**changes)))


@pytest.mark.parametrize("name", ["graphormer", "gaussian"])
def test_a_stronger_row_of_exact_attention_has_a_verdict_of_its_own(name):
    rows = claimed(**{name: (0.061, 0.13)})
    assert verdict(rows) == ("reached.", "not reached, 1 of 15 points fail.")
    (text,) = failing(rows)
    full = {"graphormer": "graphormer", "gaussian": "exact_gaussian"}[name]
    assert text.endswith(
        "relaxed energy: at most 0.85 × the strongest exact attention measured on val_id: "
        f"0.984 (0.0600 ± 0.0000 against 0.0610 ± 0.0000 of '{full}'; 100 weights against 100)"
    )
    texts = [finding.text for finding in findings(rows)]
    assert any("0.500 ×" not in t and "0.417 (" in t and "'exact_images'" in t for t in texts)


def test_a_row_of_exact_attention_that_lacks_leaves_open_which_is_the_strongest():
    rows = [row for row in claimed() if row.name != "graphormer4"]
    assert verdict(rows) == ("reached.", "unknown, results are missing.")
    rows = [row for row in claimed() if row.name != "exact_images"]
    assert verdict(rows) == ("unknown, results are missing.", "unknown, results are missing.")


def test_two_of_three_other_splits_are_enough_and_one_is_not():
    rows = claimed()
    for entry in rows[0].records:
        entry["splits"]["val_ood_ads"]["energy"] = {"mae": 0.5, "ewt": 0}
    assert verdict(rows) == ("reached.", "reached.")
    for entry in rows[0].records:
        entry["splits"]["val_ood_cat"]["energy"] = {"mae": 0.5, "ewt": 0}
    (text,) = failing(rows)
    assert "ahead of SchNet on at least 2 other splits: 1 (" in text


def test_the_better_schnet_of_each_target_is_the_one_to_beat():
    rows = claimed()
    rows[2] = rows[2]._replace(records=[record(9.0, 0.04, splits=SPLITS, seed=s) for s in range(5)])
    found = failing(rows)
    assert len(found) == 2
    assert all("before relaxation" in text for text in found)
    assert any("'schnet_packaged'" in finding.text for finding in findings(rows))


def test_missing_seeds_and_rows_leave_the_verdict_open():
    unknown = ("unknown, results are missing.",) * 2
    assert verdict(claimed(seeds=4)) == unknown
    rows = claimed()
    assert verdict(rows[:3]) == unknown
    assert verdict(rows[1:]) == unknown
    assert "n = 0 of 5 seeds for 'ours'" in show(findings(rows[1:]))
    assert findings([], Claim())[0] == Finding("n = 0 of 5 seeds for 'ours'", None)


def test_the_page_has_every_row_and_says_what_it_left_out(tmp_path):
    results, about = Results(tmp_path / "results.jsonl"), experiment()
    results.append({**about.key("tiny"), **record(0.1, 0.2, splits=about.corpus.splits[1:])})
    results.append({**about.key("tiny"), **record(0.1, 0.2), "hash": fingerprint("other")})
    text = page(about, results, ["tiny", "none"])
    assert "0.1000 (25)" in text
    assert "energy before relaxation" in text
    assert "The file holds 1 line of other rows, seeds, targets or settings." in text
    assert "Verdict" not in text  # ours is not among the rows
    assert len(entries(about, results, ["tiny"])[0].records) == 1


def test_pages_of_several_targets_stand_side_by_side(tmp_path):
    results, about = Results(tmp_path / "results.jsonl"), experiment()
    splits = about.corpus.splits[1:]
    results.append({**about.key("tiny"), **record(0.1, 0.2, splits=splits)})
    names, epochs = ["tiny", "none"], about.settings.epochs
    title = f"## Both energies by one model, {epochs} epoch"
    assert report(about, results, names) == f"{title}\n\n{page(about, results, ['tiny'])}"
    for targets, found in (("relaxed", {"energy": 0.3}), ("initial", {"energy_initial": 0.4})):
        each = about._replace(settings=replace(about.settings, targets=targets))
        errors = {target: {"mae": mae, "ewt": 0.0} for target, mae in found.items()}
        for seed in range(2):
            line = record(1, 1, seed=seed)
            results.append({**each.key("tiny"), **line, "splits": dict.fromkeys(splits, errors)})
        # The same whichever targets are asked for.
    text = report(each, results, ["tiny", "none"])
    assert text == report(about, results, ["tiny", "none"])
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == [
        f"## {part}, {epochs} epoch"
        for part in ("Both energies by one model", "Relaxed energies alone",
                     "Energies before relaxation alone", "Together and alone")
    ]  # fmt: skip
    beside = text.split("## ")[4].strip().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in beside[4:]]
    assert rows == [["tiny", "0.1000", "0.3000 ± 0.0000", "1, 2", "0.2000",
                         "0.4000 ± 0.0000", "1, 2"]]  # fmt: skip
    assert "| none" not in text
    assert "The file holds 4 lines of other" in text.split("## ")[1]
    longer = about._replace(settings=replace(about.settings, targets="initial", epochs=epochs + 1))
    results.append({**longer.key("none"), **record(1, 1), "splits": dict.fromkeys(splits, errors)})
    first, second = report(about, results, names).split("## ")[1:3]
    assert first.startswith(f"Energies before relaxation alone, {epochs + 1} epochs")
    assert "| none" in first
    assert "| tiny" not in first
    assert second.startswith("Both energies by one model")


def test_a_report_without_results_has_all_rows(tmp_path):
    results, about = Results(tmp_path / "results.jsonl"), experiment()
    assert report(about, results, ["tiny", "none"]) == page(about, results, ["tiny", "none"])


# Times


def test_rows_take_turns_on_the_same_batches(tmp_path, monkeypatch):
    from flt_mol.analysis.accuracy import times

    made, state = [], torch.get_rng_state()

    def listening(row, config, seed=0):
        made.append(Listening())
        made[-1].cutoff = 4.0 if len(made) == 1 else None
        return made[-1]

    monkeypatch.setattr(times, "build", listening)
    about = experiment()
    line = measure_times(about, ["tiny", "none"], rounds=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert made[0].seen == made[1].seen
    assert [len(batch) for batch in made[0].seen] == [4] * 4
    assert made[0].seen[0] != made[0].seen[1] == made[0].seen[3]  # eight systems, two batches
    assert line["steps_per_epoch"] == 2
    assert "row" not in line
    for name in ("tiny", "none"):
        assert len(line["times"][name]["seconds"]) == 3
    results = Results(tmp_path / "results.jsonl")
    results.append(line)
    assert len(Clock(about, results, ["tiny"]).lines) == 1
    assert missing(about, results, ["tiny"], [0]) == [Job("tiny", 0)]


def test_what_is_timed_is_a_step_of_training(monkeypatch):
    """After as many steps on the same systems the weights are those of the loop."""
    from flt_mol.analysis.accuracy import times

    made = []

    def kept(row, config, seed=0):
        made.append(build(row, config, seed))
        return made[-1]

    monkeypatch.setattr(times, "build", kept)
    about = experiment()._replace(corpus=Recipe(limit=4), settings=replace(TRAINED, epochs=3))
    measure_times(about, ["tiny"], rounds=2)
    shown = [system.with_pairs(4.0) for system in about.corpus.load("train")]
    expected = train(tiny(), shown, about.settings, 0).model
    torch.testing.assert_close(weights_of(made[0]), weights_of(expected), rtol=1e-3, atol=1e-5)
    start = build(TINY, resolved(TINY, "joint"))
    assert (weights_of(start) - weights_of(made[0])).abs().max() > 1e-4


def timed(about, seconds, per_epoch=10, **changes):
    times = {
        name: {"hash": about._replace(settings=replace(about.settings, epochs=1)).key(name)["hash"],
               "seconds": values, **changes}
        for name, values in seconds.items()
    }  # fmt: skip
    return {"times": times, "steps_per_epoch": per_epoch}


def test_the_last_times_under_these_settings_count(tmp_path):
    results, about = Results(tmp_path / "results.jsonl"), experiment()
    results.append(timed(about, {"tiny": [1.0, 2.0, 4.0], "none": [1.0, 1.0, 1.0]}))
    results.append(timed(about, {"tiny": [0.3, 0.3, 0.3]}))
    results.append(timed(about, {"tiny": [7.0], "none": [1.0]}, hash="another"))
    clock = Clock(about._replace(settings=TRAINED), results, ["tiny", "none"])  # more epochs
    assert clock.seconds("tiny") == pytest.approx(3.0)
    assert clock.seconds("none") == pytest.approx(10.0)
    assert str(clock.ratio("tiny", "none")) == "2.000 (1.500–3.000)"
    assert clock.ratio("tiny", "absent") is None
    assert Clock(about, results, ["none"]).seconds("tiny") is None
    other = about._replace(settings=replace(TRAINED, batch_size=2))
    assert Clock(other, results, ["tiny"]).seconds("tiny") is None


def test_times_in_turns_replace_those_while_training(tmp_path):
    rows = {"ours": TINY, "schnet": replace(TINY, label="SchNet"), "exact_images": TINY}
    results, about = Results(tmp_path / "results.jsonl"), experiment()._replace(rows=rows)
    for name in rows:
        for seed in range(5):
            line = record(0.1, 0.2, seed=seed, splits=SPLITS, seconds=9.0 if name == "ours" else 8)
            results.append({**about.key(name), **line})
    assert "**no**: at most the time per epoch of 'schnet', each while it was trained: 9.0" in page(
        about, results, list(rows)
    )
    results.append(timed(about, {"ours": [0.19, 0.2, 0.21], "schnet": [0.2, 0.2, 0.2]}))
    text = page(about, results, list(rows))
    assert (
        "- yes: at most the time per epoch of 'schnet', in turns on the same batches: 1.000 ("
        in (text)
    )
    costs = [[cell.strip() for cell in line.split("|")[1:6]] for line in text.splitlines()
             if "150" in line]  # fmt: skip
    assert costs == [
        ["tiny", "150", "100", "2.0", "1.000 (0.975–1.025)"],
        ["SchNet", "150", "100", "2.0", "1.000 (1.000–1.000)"],
        ["tiny", "150", "100", "8.0 ± 0.0 *", "–"],
    ]
    results.append(timed(about, {"ours": [0.18, 0.21, 0.22], "schnet": [0.2] * 3}))
    assert "**no**: at most the time per epoch" in page(about, results, list(rows))
