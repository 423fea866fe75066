"""Pairs, bases, masks and waves of a batch, and what of them is added to the embedding."""

from dataclasses import replace

import pytest
import torch
from conftest import CUTOFF, KINDS, small_model, small_pairs

from flt_mol.functional.neighbors import neighbor_pairs, pair_lengths
from flt_mol.functional.pairs import segment_sum
from flt_mol.models import EnergyConfig, ImageConfig
from flt_mol.models.build import Geometry
from flt_mol.nn.radial import smooth_cutoff
from helpers import invariances as testing


@pytest.fixture
def structures():
    return testing.random_structures(torch.Generator().manual_seed(1), natoms=(5, 1, 0, 9))


def of(name, structures):
    """A model's geometry: first features, what is added to them, and what blocks get."""
    model = small_model(**KINDS[name])
    start = model.embedding(structures.atomic_numbers, structures.tags)
    x, geometry = model.geometry(structures, model.encoder, start)
    return model, start, x, geometry


PARTS = {
    "rpe": {"position_features"},
    "performer": set(),
    "spectral": {"plane_waves"},
    "pairs": {"local"},
    "density": {"local"},
    "both filters": {"plane_waves", "local"},
    "rpe, both filters": {"position_features", "plane_waves", "local"},
    "correction": {"pairs"},
    "correction, pair types": {"pairs", "local"},
    "gaussian images": {"images"},
    "centred images": {"images"},
    "centred images, pair types": {"images", "plane_waves", "local"},
}
ADDED = {
    "pairs",
    "density",
    "both filters",
    "rpe, both filters",
    "correction, pair types",
    "centred images",
    "centred images, pair types",
}


@pytest.mark.parametrize("name", PARTS)
def test_blocks_are_told_what_their_parts_need_and_no_more(name, structures):
    model, start, x, geometry = of(name, structures)
    assert {key for key, part in geometry._asdict().items() if part is not None} == PARTS[name]
    assert (x is start) == (name not in ADDED)
    assert (model.geometry.cutoff is None) == (PARTS[name] <= {"position_features", "plane_waves"})
    if name in ADDED:
        assert (x - start)[structures.system != 1].abs().max() > 1e-3


def tensors_of(part):
    """All tensors of nested tuples, in order."""
    if isinstance(part, torch.Tensor):
        return [part]
    return [x for inner in part for x in tensors_of(inner)] if isinstance(part, tuple) else []


@pytest.mark.parametrize("name", PARTS)
def test_everything_follows_positions_that_have_moved(name, structures):
    noise = torch.randn(15, 3, generator=torch.Generator().manual_seed(2))
    moved = structures.positions + 0.3 * noise
    there = replace(structures, positions=moved)
    _, _, before, old = of(name, structures)
    _, _, x, geometry = of(name, there.with_pairs(CUTOFF))
    _, _, truth, expected = of(name, there)
    assert torch.equal(x, truth)
    assert torch.equal(x, before) == (name not in ADDED)
    for part, given, stale in zip(geometry, expected, old, strict=True):
        found, true = tensors_of(part), tensors_of(given)
        assert len(found) == len(true)
        assert all(torch.equal(y, z) for y, z in zip(found, true, strict=True))
        if part is not None:
            differs = zip(found, tensors_of(stale), strict=True)
            assert not all(torch.equal(y, z) for y, z in differs)


def test_the_density_is_a_local_filter_of_elements(structures):
    model, start, x, geometry = of("density", structures)
    pairs = neighbor_pairs(
        structures.positions, structures.cell, structures.pbc, structures.ptr, CUTOFF
    )
    assert torch.equal(geometry.local.pairs.index_i, pairs.index_i)
    assert torch.equal(x, start + model.geometry.density(start, geometry.local))
    vectors = pairs.vectors(structures.positions, structures.cell, structures.ptr)
    assert torch.equal(geometry.local.distances, pair_lengths(vectors))


def test_pairs_given_are_for_this_cutoff(structures):
    model = small_model(**KINDS["pairs"])
    carried, short = structures.with_pairs(CUTOFF), structures.with_pairs(CUTOFF - 1)
    assert model.prepare_batch(carried).pairs is carried.pairs
    for other in (short, structures):
        found = model.prepare_batch(other).pairs
        assert all(torch.equal(x, y) for x, y in zip(found, carried.pairs, strict=True))


def dense_mask(structures, log_weight):
    """exp of log weights (P, H) summed over images, (N, N, H); pairs with self pairs."""
    pairs = neighbor_pairs(
        structures.positions,
        structures.cell,
        structures.pbc,
        structures.ptr,
        CUTOFF,
        self_pairs=True,
    )
    vectors = pairs.vectors(structures.positions, structures.cell, structures.ptr)
    n = structures.num_atoms
    weights = log_weight(pairs, vectors).exp()
    u = (pair_lengths(vectors) / CUTOFF).clamp(max=1)
    weights = weights * (1 - 10 * u**3 + 15 * u**4 - 6 * u**5)[:, None]
    flat = weights.new_zeros(n * n, weights.shape[1])
    return flat.index_add(0, pairs.index_i * n + pairs.index_j, weights).view(n, n, -1)


@pytest.mark.parametrize(
    "name", ["gaussian images", "centred images", "centred images, pair types"]
)
def test_image_keys_are_the_sum_over_images_of_the_mask(name, structures):
    model, _, _, geometry = of(name, structures)
    layer = model.geometry.images

    def log_weight(pairs, vectors):
        if name == "gaussian images":
            return layer.source.mask(vectors)
        z = structures.atomic_numbers
        features = layer.features(pair_lengths(vectors), z[pairs.index_i], z[pairs.index_j])
        return layer.bias(features)

    expected = dense_mask(structures, log_weight)
    images = geometry.images
    found = torch.zeros_like(expected)
    found[images.index_i, images.index_j] = images.weight.exp()
    torch.testing.assert_close(found, expected)
    own = images.index_i == images.index_j
    assert sorted(images.index_i[own].tolist()) == list(range(15))
    assert (images.weight[own] > -1e3).all()


def test_the_density_of_centred_images_is_that_of_other_atoms(structures):
    model, start, x, _ = of("centred images", structures)
    layer = model.geometry.images
    pairs = neighbor_pairs(
        structures.positions, structures.cell, structures.pbc, structures.ptr, CUTOFF
    )
    r = pair_lengths(pairs.vectors(structures.positions, structures.cell, structures.ptr))
    near = layer.features(r, None, None) * smooth_cutoff(r, CUTOFF)[:, None]
    expected = layer.density_out(segment_sum(near, pairs.index_i, 15))
    torch.testing.assert_close(x - start, expected, rtol=0, atol=1e-5)


def test_all_blocks_share_one_geometry(structures, monkeypatch):
    """It is made once a pass for positions that move, and once for those that do not."""
    for feedback, expected in (("features", 1), ("positions", 3)):
        outputs = ["energy", "displacement"]
        model = small_model(
            **KINDS["both filters"], num_layers=3, recycles=3, feedback=feedback, outputs=outputs
        )
        calls = []
        forward = Geometry.forward

        def counted(self, *given, forward=forward, calls=calls):
            calls.append(given)
            return forward(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Geometry, "forward", counted)
            model(structures)
        assert len(calls) == expected


def test_bf16_autocast_leaves_geometry_alone(structures):
    for name in ("both filters", "correction", "gaussian images", "centred images"):
        model, _, _, exact = of(name, structures)
        start = model.embedding(structures.atomic_numbers, structures.tags)
        with torch.autocast("cpu", torch.bfloat16):
            x, half = model.geometry(structures, model.encoder, start)
        assert x.dtype == torch.float32
        for given, truth in ((half.pairs, exact.pairs), (half.images, exact.images)):
            if truth is not None:
                torch.testing.assert_close(given.weight, truth.weight, rtol=0, atol=1e-6)
        if exact.local is not None:
            assert torch.equal(half.local.basis, exact.local.basis)


def test_random_numbers_come_from_the_generator():
    config = EnergyConfig(
        embed_dim=8,
        num_heads=2,
        attention="exact",
        rpe=None,
        pairs=small_pairs(vectors=2, pair_types=True),
        images=ImageConfig(cutoff=CUTOFF, num_basis=4),
    )
    state = torch.get_rng_state()
    first, second, other = (
        Geometry(config, torch.Generator().manual_seed(seed)).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, second[key]) for key, x in first.items())
    assert sum(not torch.equal(x, other[key]) for key, x in first.items()) > 10
