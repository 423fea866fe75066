import numpy as np
import pytest
import torch

from flt_mol.evaluation.baselines import (
    CompositionRegression,
    Constant,
    composition_features,
    score,
)
from flt_mol.structures import Structures

METALS = (28, 29, 46)


def system(slab, adsorbate, energy=None, sid=0):
    numbers = [*slab, *adsorbate]
    tags = [i % 2 for i in range(len(slab))] + [2] * len(adsorbate)
    return Structures.single(
        numbers, np.zeros((len(numbers), 3)), tags=tags, energy=energy, sid=sid
    )


def law(slab, adsorbate):
    """A closed form that is linear in counts of the adsorbate and fractions of the slab."""
    per_atom = {1: 0.3, 6: -0.7, 8: -1.1}
    per_metal = {28: 0.25, 29: -0.5, 46: 1.5}
    return 2.0 + sum(per_atom[z] for z in adsorbate) + sum(per_metal[z] for z in slab) / len(slab)


def random_systems(count, seed):
    rng = np.random.default_rng(seed)
    systems = []
    for i in range(count):
        slab = rng.choice(METALS, size=rng.integers(4, 12)).tolist()
        adsorbate = rng.choice((1, 6, 8), size=rng.integers(1, 4)).tolist()
        systems.append(system(slab, adsorbate, law(slab, adsorbate), sid=i))
    return systems


def test_constant_is_the_median():
    train = [system([29], [1], energy) for energy in (-3.0, 0.5, 100.0)]
    baseline = Constant.fit(train)
    assert baseline.value == 0.5
    assert baseline.predict([Structures.cat(train), train[0]]).tolist() == [0.5] * 4


def test_regression_finds_a_linear_law():
    baseline = CompositionRegression.fit(random_systems(60, seed=0))
    other = random_systems(20, seed=1)
    targets = torch.cat([s.energy for s in other]).numpy()
    np.testing.assert_allclose(baseline.predict(other), targets, atol=1e-10)
    np.testing.assert_allclose(baseline.adsorbate[[1, 6, 8]], [0.3, -0.7, -1.1], atol=1e-10)
    # fractions sum to 1, so only differences between metals are determined
    np.testing.assert_allclose(baseline.slab[46] - baseline.slab[29], 2.0, atol=1e-10)


def test_regression_is_least_squares():
    # adsorbate count alone: the straight line through (1, 0), (2, 2), (2, 4) is E = 3 n − 3
    train = [system([29], [1], 0.0), system([29], [1, 1], 2.0), system([29], [1, 1], 4.0)]
    np.testing.assert_allclose(
        CompositionRegression.fit(train).predict(train), [0.0, 3.0, 3.0], atol=1e-12
    )


def test_batches_do_not_matter():
    systems = random_systems(30, seed=2)
    single, packed = (
        CompositionRegression.fit(systems),
        CompositionRegression.fit([Structures.cat(systems[:11]), Structures.cat(systems[11:])]),
    )
    np.testing.assert_allclose(
        single.predict(systems), packed.predict([Structures.cat(systems)]), atol=1e-12
    )


def test_unseen_elements_have_coefficient_zero():
    baseline = CompositionRegression.fit(random_systems(60, seed=3))
    known = [28, 29, 46, 46]
    gold = baseline.predict([system([*known[:3], 79], [8, 7]), system([79], [7])])
    assert baseline.adsorbate[7] == 0.0
    assert baseline.slab[79] == 0.0
    slab = (baseline.slab[28] + baseline.slab[29] + baseline.slab[46]) / 4
    np.testing.assert_allclose(
        gold, [baseline.intercept + slab + baseline.adsorbate[8], baseline.intercept]
    )


def test_metal_in_the_adsorbate_is_another_column():
    features = composition_features(system([29, 29, 28], [29]))
    assert features[0, 29] == 1.0
    assert features[0, 119 + 29] == pytest.approx(2 / 3)
    assert features.sum() == pytest.approx(2.0)


def test_system_without_slab():
    assert composition_features(system([], [8, 1])).sum() == 2.0


def test_score():
    train = [system([29], [1], energy) for energy in (0.0, 0.0, 0.02, 0.019, -1.0)]
    result = score(Constant(0.0), train)
    assert result["count"] == 5
    assert result["mae"] == pytest.approx(1.039 / 5)
    assert result["ewt"] == pytest.approx(3 / 5)


def test_missing_energies_and_empty_sets_are_named():
    with pytest.raises(ValueError, match="'slab-7'.*no energy"):
        Constant.fit([system([29], [1], sid="slab-7")])
    with pytest.raises(ValueError, match="no systems"):
        CompositionRegression.fit([])
    assert Constant(1.0).predict([]).shape == (0,)
    assert CompositionRegression.fit(random_systems(3, seed=4)).predict([]).shape == (0,)
