"""Targets in one pass, whatever the batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flt_mol.data import open_dataset
from flt_mol.data.loading import statistics
from flt_mol.data.loading.statistics import target_statistics, trained_on
from flt_mol.models.energy import Normalizer
from flt_mol.structures import Structures


def system(sid: int, energy: float | None) -> Structures:
    return Structures.single([1 + sid % 3, 78], torch.zeros(2, 3), sid=sid, energy=energy)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_AT_ONCE", 4)


@pytest.mark.usefixtures("small_batches")
def test_of_a_file_and_of_a_list(write_lmdb: Any, make_record: Any) -> None:
    energies = torch.linspace(-3, 4, 11, dtype=torch.float64)
    path = write_lmdb({i: make_record(y_relaxed=float(e)) for i, e in enumerate(energies)})
    dataset = open_dataset(path)
    seen: list[tuple[int, int]] = []
    found = target_statistics(dataset, progress=lambda *counts: seen.append(counts))
    assert found == target_statistics(list(dataset))
    assert seen == [(4, 11), (8, 11), (11, 11)]
    assert found.energies.count == 11
    assert found.energies.mean == pytest.approx(energies.mean().item(), rel=1e-14)
    assert found.energies.std == pytest.approx(energies.std(correction=0).item(), rel=1e-14)
    assert (found.lowest, found.highest) == (-3.0, 4.0)
    assert found.elements == (6, 8, 78)


def test_of_one_and_of_equal_targets() -> None:
    for systems in ([system(0, 0.1)], [system(i, 0.1) for i in range(9)]):
        energies = target_statistics(systems).energies
        assert (energies.mean, energies.std) == (0.1, 0.0)
        with pytest.warns(UserWarning, match="std is set to 1"):
            Normalizer().fit(energies)


def test_huge_targets() -> None:
    found = target_statistics([system(0, 1e300), system(1, -1e300), system(2, 1e300)]).energies
    assert found.mean == pytest.approx(1e300 / 3)
    assert found.std == pytest.approx(1e300 * math.sqrt(8) / 3)
    with pytest.raises(ValueError, match=r"spread 9\.\d+e\+299 eV: that is no energy"):
        Normalizer().fit(found)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_target_that_is_none_of_them_is_named(bad: float) -> None:
    systems = [system(100 + i, 0.5 * i) for i in range(9)]
    systems[6] = system(106, bad)
    with pytest.raises(ValueError, match=f"target of sid 106 is {bad} eV"):
        target_statistics(systems)
    systems[5] = systems[7] = system(107, None)
    with pytest.raises(ValueError, match=r"sid 107 \(and 1 more near it\) has no target"):
        target_statistics(systems)


def test_of_nothing() -> None:
    with pytest.raises(ValueError, match="no systems"):
        target_statistics([])


def both(sid: int, energy: float, initial: float | None) -> Structures:
    return Structures.single(
        [78], torch.zeros(1, 3), sid=sid, energy=energy, energy_initial=initial
    )


@pytest.mark.usefixtures("small_batches")
def test_energies_before_relaxation_in_the_same_pass() -> None:
    systems = [both(i, float(i), 10.0 * i) for i in range(9)]
    found = target_statistics(systems, initial=True)
    assert found.energies.mean == 4.0
    assert found.energies_initial is not None
    assert (found.energies_initial.count, found.energies_initial.mean) == (9, 40.0)
    assert found.energies_initial.std == pytest.approx(10 * found.energies.std)
    assert target_statistics(systems).energies_initial is None


@pytest.mark.usefixtures("small_batches")
def test_energies_before_relaxation_matter_only_where_asked_for() -> None:
    systems = [both(100 + i, float(i), 10.0 * i) for i in range(9)]
    systems[6] = both(106, 6.0, math.nan)
    assert target_statistics(systems).energies.count == 9
    with pytest.raises(ValueError, match="energy before relaxation of sid 106 is nan eV"):
        target_statistics(systems, initial=True)
    systems[6] = both(106, 6.0, None)
    assert target_statistics(systems).energies.count == 9
    with pytest.raises(ValueError, match=r"sid 106 has no energy before relaxation.*\(y_init\)"):
        target_statistics(systems, initial=True)


def test_median_and_largest_system():
    atoms = [
        Structures.single([1] * n, [[0, 0, i] for i in range(n)], energy=e)
        for n, e in ((1, -2.0), (3, 5.0), (2, 0.0), (1, 1.0))
    ]
    found = target_statistics(atoms)
    assert (found.median, found.most_atoms) == (0.5, 3)
    told = {"systems": 4, "energy_median": 0.5, "most_atoms": 3}
    assert trained_on(found) == told
    assert trained_on(found, {"most_atoms": 2, "systems": 9}) == told
    assert trained_on(found, {"most_atoms": 7})["most_atoms"] == 7
