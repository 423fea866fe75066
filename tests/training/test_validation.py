"""Errors over a split, by hand, whatever the batches."""

import math
from dataclasses import replace

import pytest
import torch

from flt_mol import Structures
from flt_mol.training.validation import OutputMetrics


def system(energy, moves, fixed, sid):
    n = len(moves)
    start = torch.zeros(n, 3)
    start[:, 0] = 3.0 * torch.arange(n)
    relaxed = start.clone()
    relaxed[:, 1] = torch.tensor(moves)
    return Structures.single(
        [1] * n,
        start,
        fixed=fixed,
        sid=sid,
        energy=energy,
        energy_initial=2 * energy,
        positions_relaxed=relaxed,
    )


def systems():
    return [
        system(1.0, [0.5, 0.0], [False, True], "a"),
        system(2.0, [1.0, 2.0, 3.0], [False, False, False], "b"),
        system(3.0, [0.0], [True], "c"),
    ]


def outputs(structures, passes):
    """Pass k predicts energies too high by 1/k, and no movement, but in the last pass all of it."""
    number = torch.arange(1, passes + 1)
    errors = 1.0 / number[:, None]
    moved = torch.zeros(passes, structures.num_atoms, 3)
    moved[-1] = structures.positions_relaxed - structures.positions
    moved[-1, :, 2] = 0.25
    every = {
        "energy": structures.energy + errors,
        "energy_initial": structures.energy_initial + 3 * errors,
        "displacement": moved,
    }
    last = {name: value[-1] for name, value in every.items()}
    return last if passes == 1 else last | {f"{k}_passes": v for k, v in every.items()}


@pytest.mark.parametrize("sizes", [[3], [1, 2], [1, 1, 1]])
def test_each_pass_over_systems_and_free_atoms(sizes):
    metrics, rest = OutputMetrics(), systems()
    for size in sizes:
        batch, rest = Structures.cat(rest[:size]), rest[size:]
        metrics.update(outputs(batch, 2), batch)
    stay = (0.5 + 1 + 2 + 3) / 4
    assert metrics.compute() == pytest.approx(
        {
            "mae": 0.5,
            "ewt": 0.0,
            "mae_pass1": 1.0,
            "mae_pass2": 0.5,
            "energy_initial_mae": 1.5,
            "energy_initial_mae_pass1": 3.0,
            "energy_initial_mae_pass2": 1.5,
            "displacement": 0.25,
            "displacement_pass1": stay,
            "displacement_pass2": 0.25,
            "displacement_unmoved": stay,
        }
    )


def test_one_pass_has_no_numbers_and_other_outputs_are_not_asked_for():
    batch = replace(Structures.cat(systems()), energy_initial=None, positions_relaxed=None)
    metrics = OutputMetrics()
    metrics.update({"energy": batch.energy + 0.01}, batch)
    assert metrics.compute() == pytest.approx({"mae": 0.01, "ewt": 1.0})


def test_no_free_atoms_have_no_distance():
    batch = systems()[2]
    metrics = OutputMetrics()
    metrics.update(outputs(batch, 1), batch)
    assert set(metrics.compute()) == {"mae", "ewt", "energy_initial_mae"}


def test_bad_energies_and_missing_targets_are_named():
    batch = Structures.cat(systems())
    found = outputs(batch, 1)
    bad = found["energy"].clone()
    bad[1] = math.nan
    with pytest.raises(ValueError, match="sid b"):
        OutputMetrics().update({**found, "energy": bad}, batch)
    with pytest.raises(ValueError, match="no relaxed positions for some of sids a, b, c"):
        OutputMetrics().update(found, replace(batch, positions_relaxed=None))
    with pytest.raises(ValueError, match="no systems"):
        OutputMetrics().compute()
