import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from flt_mol.analysis.accuracy.evaluation import evaluate
from flt_mol.analysis.accuracy.loop import Settings, seeded, train, without_denormals
from flt_mol.analysis.accuracy.report import entries, page, told
from flt_mol.analysis.accuracy.results import Results, fingerprint
from flt_mol.analysis.accuracy.rows import ROWS, Row, build, count_weights, resolved
from flt_mol.analysis.accuracy.runs import Experiment, Job, Recipe, measure, missing, run, usable
from flt_mol.analysis.accuracy.table import Entry, Spread, cost_table, energy_table, moves_table
from flt_mol.analysis.accuracy.verdict import Claim, Finding, findings, show
from flt_mol.models.normalizer import Normalizer
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


def test_a_missing_package_is_named(monkeypatch):
    from flt_mol.analysis.accuracy.rivals import SchNet

    monkeypatch.setitem(sys.modules, "torch_geometric.nn.models.schnet", None)
    with pytest.raises(ImportError, match="pip install torch_geometric"):
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
    assert lines[0] == ["row", "parameters", "weights", "s/epoch", "relaxed energy / SchNet"]
    assert lines[2] == ["ours", "150", "100", "1.0 ± 0.0", "0.50"]
    assert lines[4] == ["not yet", "–", "–", "–", "–"]


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


def claimed(ours=(0.06, 0.05), schnet=(0.07, 0.06), exact=(0.08, 0.12), seeds=5, **changes):
    """Rows with these errors everywhere."""
    settings = {"seconds": 1.0, "weights": 100, **changes}
    rows = {"ours": ours, "schnet": schnet, "schnet_packaged": (9.0, 9.0), "exact_images": exact}
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


def verdict(rows):
    return show(findings(rows)).splitlines()[-1]


def failing(rows):
    return [finding.text for finding in findings(rows) if finding.holds is False]


def test_the_verdict_on_numbers_that_reach_it():
    assert verdict(claimed()) == "Verdict: reached."
    assert len(findings(claimed())) == 12


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"schnet": (0.05, 0.06)}, ["lower MAE than SchNet", "ahead of SchNet"]),
        ({"ours": (0.06, 0.0601), "schnet": (0.07, 0.06), "exact": (0.08, 0.1202)},
         ["lower MAE than SchNet", "ahead of SchNet"]),
        ({"exact": (0.07, 0.12)}, ["at most 0.85 ×"]),
        ({"exact": (0.08, 0.09)}, ["at most 0.5 ×"]),
        ({"seconds": 1.01}, ["time per epoch"]),
        ({"weights": 103}, ["no more weights"]),
    ],
)  # fmt: skip
def test_the_verdict_on_numbers_that_do_not(changes, texts):
    found = failing(claimed(**changes))
    assert len(found) == len(texts)
    for text, line in zip(texts, found, strict=True):
        assert text in line
    assert verdict(claimed(**changes)).startswith("Verdict: not reached")


def test_two_of_three_other_splits_are_enough_and_one_is_not():
    rows = claimed()
    for entry in rows[0].records:
        entry["splits"]["val_ood_ads"]["energy"] = {"mae": 0.5, "ewt": 0}
    assert verdict(rows) == "Verdict: reached."
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
    assert verdict(claimed(seeds=4)) == "Verdict: unknown, results are missing."
    rows = claimed()
    assert verdict(rows[:3]) == "Verdict: unknown, results are missing."
    assert verdict(rows[1:]) == "Verdict: unknown, results are missing."
    assert "n = 0 of 5 seeds for 'ours'" in show(findings(rows[1:]))
    assert findings([], Claim())[0] == Finding("n = 0 of 5 seeds for 'ours'", None)


def test_the_page_has_every_row_and_says_what_it_left_out(tmp_path):
    results, about = Results(tmp_path / "results.jsonl"), experiment()
    results.append({**about.key("tiny"), **record(0.1, 0.2, splits=about.corpus.splits[1:])})
    results.append({**about.key("tiny"), **record(0.1, 0.2), "hash": fingerprint("other")})
    text = page(about, results, ["tiny", "none"])
    assert "0.1000 (25)" in text
    assert "energy before relaxation" in text
    assert "The file holds 1 lines of other rows, seeds or settings." in text
    assert "Verdict" not in text  # ours is not among the rows
    assert len(entries(about, results, ["tiny"])[0].records) == 1
