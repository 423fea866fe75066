import math

import pytest
import torch

from flt_mol.analysis.speed import one_system, parts
from flt_mol.analysis.speed.dense_graphormer import DenseGraphormer
from flt_mol.analysis.speed.floors import Product
from flt_mol.analysis.speed.one_system import WHAT, exponent, one_system_model
from flt_mol.analysis.speed.one_system import measure as measure_system
from flt_mol.analysis.speed.slabs import crystal, slabs
from flt_mol.analysis.speed.training_step import DENSE, OURS, Shape, build_model, measure, step
from flt_mol.models import EnergyModel
from flt_mol.nn.spectral_filter import SpectralFilter

SHAPE = Shape(width=16, heads=2, blocks=2, ffn=16, cutoff=3.5)


@pytest.fixture(scope="module")
def small():
    return slabs(2, layers=2)


def test_slabs_are_periodic_and_tagged():
    found = slabs(8)
    assert len(found) == 8
    assert 75 <= min(found.natoms) <= max(found.natoms) <= 82
    assert bool(found.pbc.all())
    assert all(system.tags.unique().tolist() == [0, 1, 2] for system in found)
    first = found[0]
    height = first.positions[:, 2]
    assert height[first.tags == 2].min() > height[first.tags == 1].max()
    assert height[first.tags == 1].min() > height[first.tags == 0].max() + 1
    assert len(first.with_pairs(3.5).pairs.index_i) > 0


@pytest.mark.parametrize("number", [1, 500, 1000, 4000, 1_000_000])
def test_crystals_are_about_as_large_as_wanted(number):
    found = crystal(number)
    assert found.num_atoms % 4 == 0
    if number >= 500:
        assert found.num_atoms == pytest.approx(number, rel=0.05)
    density = found.num_atoms / torch.linalg.det(found.cell[0]).item()
    assert density == pytest.approx(4 / 3.61**3, rel=1e-5)


def test_a_crystal_has_twelve_nearest_neighbours():
    pairs = crystal(256, rattle=0.0).with_pairs(3.0).pairs
    assert len(pairs.index_i) == 12 * 256


def test_no_atoms_are_refused():
    with pytest.raises(ValueError, match="expected 1 at least"):
        crystal(0)


def test_the_dense_graphormer_computes_what_ours_does(small):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("graphormer3d-exact", SHAPE)
    dense, weights = DenseGraphormer(model), list(model.parameters())
    energies = [net(small)["energy"] for net in (model, dense)]
    torch.testing.assert_close(energies[0], energies[1], atol=1e-4, rtol=1e-4)
    ours, theirs = (torch.autograd.grad(e.sum(), weights) for e in energies)
    for one, other in zip(ours, theirs, strict=True):
        scale = one.abs().max().item() + 1e-3
        torch.testing.assert_close(one, other, atol=1e-3 * scale, rtol=1e-3)


def test_the_dense_graphormer_refuses_other_models():
    with pytest.raises(ValueError, match="centred"):
        DenseGraphormer(EnergyModel())


@pytest.mark.parametrize("passes", ["forward", "training"])
def test_parts_are_measured_against_their_floors(passes):
    found = parts.measure(passes, num_slabs=1, layers=1, shape=SHAPE._asdict(), rounds=1,
                          gemm_size=8)  # fmt: skip
    assert set(found["floors"]) == set(found["bytes"]) == set(parts.PARTS)
    assert all(floor["roofline"] > 0 for floor in found["floors"].values())
    # 2 · rows · (16 · 16 + 16 · 16), and twice as much for the way back.
    forward = 2 * found["atoms"] * 512
    assert found["floors"]["feed-forward net"]["flops"] == forward * (
        1 if passes == "forward" else 3
    )


def test_work_of_the_filters_by_hand():
    layer = SpectralFilter(8, 2, num_basis=3)
    work = parts.spectral_work([5, 4], [25, 0], [0, 4 * 6], 8, layer)
    assert work == [
        Product(9, 8, 8, 2),
        Product(2, 3, 25), Product(5, 5, 4, 2),  # kernels mixed, applied
        Product(6, 4, 8), Product(4, 6, 8),  # structure factors, read back
    ]  # fmt: skip
    assert sum(one.flops for one in parts.pair_work(4, 10, 8, basis=3)) == (
        2 * 4 * (8 * 8 + 16 * 8 + 8 * 8) + 10 * 2 * 8 * (3 + 1)
    )


def test_steps_of_all_models():
    pytest.importorskip("torch_geometric")
    found = measure([OURS, "graphormer3d-exact", DENSE, "SchNet (PyG)", "flt-small"], num_slabs=2,
                    dense_slabs=1, layers=1, shape=SHAPE._asdict(), rounds=1)  # fmt: skip
    assert set(found["seconds"]) == set(found["bytes"]) == set(found["weights"])
    assert found["slabs"][DENSE] == 1
    assert found["slabs"][OURS] == 2
    assert found["atoms"][DENSE] < found["atoms"][OURS]
    assert found["weights"][DENSE] == found["weights"]["graphormer3d-exact"]


def test_the_exponent_of_a_power_law():
    sizes = [1000, 4000, 16000, 64000, 1_000_000]
    costs = [5.0, *(3e-6 * n**1.25 for n in sizes[1:])]
    assert exponent(sizes, costs) == pytest.approx(1.25, abs=1e-4)
    noise = [cost * math.exp(0.01 * (-1) ** i) for i, cost in enumerate(costs)]
    assert exponent(sizes, noise) == pytest.approx(1.25, abs=0.01)
    assert exponent(sizes, costs, from_size=1) != pytest.approx(1.25, abs=0.01)
    assert exponent([1000, 4000], [1.0, 2.0]) is None
    assert exponent([4000, 4000], [1.0, 2.0]) is None


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("passes", ["forward", "training"])
def test_one_system(what, passes):
    found = measure_system(what, 100, passes, width=8, blocks=1, max_vectors=20, rounds=1)
    assert found["atoms"] == 108
    assert (found["pairs"] > 0) == (what in ("model", "attention + pair filter"))
    assert (0 < found["vectors"] <= 20) == (what in ("model", "attention + spectral filter"))
    assert found["bytes"] > 4 * 108 * 8
    assert len(found["seconds"]) == 1


def test_unknown_systems_are_refused():
    with pytest.raises(ValueError, match="expected one of model, attention"):
        one_system_model("everything")
    with pytest.raises(ValueError, match="expected one of forward, training"):
        measure_system("model", 100, "backward")


def test_passes_are_what_they_are_called(small):
    layer = torch.nn.Linear(16, 16)
    forward = parts._run(layer, layer, small, SHAPE, "forward")
    assert not forward().requires_grad
    assert len(parts._run(layer, layer, small, SHAPE, "training")()) == 3
    weight = torch.ones(3, requires_grad=True)
    assert not one_system._passing(lambda: 2 * weight.sum(), [weight], "forward")().requires_grad
    gradients = one_system._passing(lambda: 2 * weight.sum(), [weight], "training")()
    assert gradients[0].tolist() == [2.0] * 3


def test_a_step_reaches_the_weights_of_both_outputs():
    model = build_model("flt-small", SHAPE)
    found = step(model, slabs(1, layers=1))()
    named = dict(zip((name for name, _ in model.named_parameters()), found, strict=True))
    heads = [name for name in named if "head" in name]
    assert {name.split(".")[0] for name in heads} == {"head", "displacement_head"}
    assert all(named[name] is not None for name in heads)
