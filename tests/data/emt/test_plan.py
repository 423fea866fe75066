"""Splits, hold-outs and the independence of the random draws."""

import numpy as np
import pytest

from flt_mol.data.emt import plan, surfaces


@pytest.mark.parametrize("num_slabs", [5, 12, 100, plan.NUM_SLABS])
def test_slab_ids(num_slabs):
    ids = plan.slab_ids(num_slabs)
    splits = [plan.split_of(i) for i in ids]
    assert len(set(ids)) == num_slabs
    assert set(splits) == set(plan.SPLITS)
    assert len({splits.count(s) for s in plan.SPLITS[1:]}) == 1


def test_a_larger_plan_keeps_the_smaller_one():
    assert set(plan.slab_ids(40)) <= set(plan.slab_ids(70))


@pytest.mark.parametrize("num_slabs", [0, 4, 100_001])
def test_impossible_numbers_of_slabs(num_slabs):
    with pytest.raises(ValueError, match=f"num_slabs is {num_slabs}"):
        plan.slab_ids(num_slabs)


def test_every_set_of_metals_is_on_one_side():
    for count, total in ((1, 7), (2, 21), (3, 35)):
        trained = plan.element_sets(count, held_out=False)
        held_out = plan.element_sets(count, held_out=True)
        assert len(trained) + len(held_out) == total
        assert not set(trained) & set(held_out)
    # three disjoint pairs: each is in five ternaries, no ternary has two
    assert len(plan.element_sets(2, held_out=True)) == 3
    assert len(plan.element_sets(3, held_out=True)) == 15


def test_every_metal_is_trained_in_alloys():
    trained = plan.element_sets(2, held_out=False)
    assert {metal for pair in trained for metal in pair} == set(surfaces.METALS)


def test_adsorbates_are_on_one_side_and_sizes_are_mixed():
    trained, held_out = plan.TRAINED_ADSORBATES, plan.HELD_OUT_ADSORBATES
    assert not set(trained) & set(held_out)
    assert 14 <= len(trained) + len(held_out) <= 20
    assert sorted(len(surfaces.gas_geometry(name)) for name in held_out) == [1, 2, 3, 4]


@pytest.mark.parametrize("split", plan.SPLITS)
def test_draws_keep_to_the_split(split):
    rng = np.random.default_rng(0)
    for _ in range(200):
        draw = plan.draw_slab(split, rng)
        held_out = any(set(pair) <= set(draw.symbols) for pair in plan.HELD_OUT_PAIRS)
        assert held_out == (split in ("val_ood_cat", "val_ood_both"))
        assert len(draw.symbols) == np.prod(draw.size) <= 48
        assert abs(draw.strain) <= 0.04
        assert set(draw.size) <= {2, 3, 4}
        assert draw.size[2] > 2 or draw.facet != "110"
        names = plan.draw_adsorbates(split, rng)
        assert len(set(names)) == len(names) == 4
        pool = (
            plan.HELD_OUT_ADSORBATES
            if split in ("val_ood_ads", "val_ood_both")
            else plan.TRAINED_ADSORBATES
        )
        assert set(names) <= set(pool)


def test_at_least_80_percent_are_alloys():
    rng = np.random.default_rng(1)
    alloys = [len(set(plan.draw_slab("train", rng).symbols)) > 1 for _ in range(2000)]
    # 85 % are drawn; 80 % is 6 standard deviations below
    assert np.mean(alloys) > 0.8


def test_generators_depend_on_seed_and_key_alone():
    draw = [plan.generator(seed, *key).random() for seed, key in SEEDS]
    again = [plan.generator(seed, *key).random() for seed, key in reversed(SEEDS)]
    assert draw == again[::-1]
    assert len(set(draw)) == len(draw)


SEEDS = [(0, (1,)), (0, (2,)), (1, (1,)), (0, (1, 0)), (0, (1, 1)), (0, (1, 0, 0))]
