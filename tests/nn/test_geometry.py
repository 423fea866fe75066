"""Near pairs and periodic images inside attention, against weights that are written out."""

import itertools

import pytest
import torch

from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.nn import (
    FLTAttention,
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
    ImageKeys,
    PairCorrection,
    PairWeights,
)
from helpers.kernels import kernel_attention
from helpers.masks import relative_mask

C, H = 12, 3
F64 = torch.float64
CELL = torch.tensor(
    [[[4.0, 0, 0], [1.0, 4.5, 0], [0.5, -0.3, 5.0]], [[7.0, 0, 0], [0, 7, 0], [0, 0, 7]]]
)
PTR = torch.tensor([0, 4, 9])
PBC = torch.tensor([[True, True, True], [True, True, False]])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make(mode, **settings):
    generator = seeded(1)
    spectrum = GaussianSpectrum(H, 4, sigma_max=2.0, generator=generator)
    rpe = FourierRPE(spectrum, GaussianFrequencies(5, generator=generator))
    return FLTAttention(C, H, rpe=rpe, mode=mode, generator=generator, **settings).double()


def draw():
    generator = seeded(2)
    x = torch.randn(9, C, generator=generator, dtype=F64)
    fractional = torch.rand(9, 3, generator=generator, dtype=F64)
    cell = CELL.double()
    system = torch.tensor([0] * 4 + [1] * 5)
    return x, (fractional[:, None] @ cell[system]).squeeze(1), cell


def correction_matrix(weights, rows=9):
    matrix = torch.ones(rows, rows, H, dtype=weights.weight.dtype)
    return matrix.index_put((weights.index_i, weights.index_j), 1 + weights.weight)


@pytest.mark.parametrize("mode", ["linear", "exact"])
def test_pairs_multiply_attentions_weights_under_one_normaliser(mode):
    """Values and gradients, to positions and to the correction's parameters, too."""
    layer = make(mode)
    x, positions, cell = draw()
    correction = PairCorrection(H, cutoff=6.0, num_basis=8, generator=seeded(3)).double()
    pairs = neighbor_pairs(positions, cell, PBC, PTR, 6.0)
    x.requires_grad_(), positions.requires_grad_()
    weights = correction(pairs, pairs.vectors(positions, cell, PTR))
    out = layer(x, positions, ptr=PTR, pairs=weights)

    at = layer.rpe(positions, PTR)
    q, k, v = (f(x).view(9, H, -1) for f in (layer.query, layer.key, layer.value))
    if mode == "exact":
        logits = torch.einsum("ihd,jhd->hij", q, k) / 2 + relative_mask(at.query, at.key)
        kernel = logits.exp()
    else:
        phi = layer.feature_map
        features = [phi(y, at, key=key).exp() for y, key in ((q, False), (k, True))]
        kernel = torch.einsum("ihm,jhm->hij", *features)
    kernel = kernel * correction_matrix(weights).permute(2, 0, 1)
    system = torch.tensor([0] * 4 + [1] * 5)
    kernel = kernel * (system[:, None] == system)
    attended = torch.einsum("hij,jhd->ihd", kernel / kernel.sum(-1, keepdim=True), v)
    truth = layer.out(attended.flatten(1))

    torch.testing.assert_close(out, truth, rtol=0, atol=1e-10)
    inputs = [x, positions, *layer.parameters(), *correction.parameters()]
    seed = torch.randn(out.shape, generator=seeded(4), dtype=F64)
    gradients = torch.autograd.grad(out, inputs, seed, retain_graph=True)
    expected = torch.autograd.grad(truth, inputs, seed)
    for gradient, true in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, true, rtol=1e-8, atol=1e-9)
    without = layer(x, positions, ptr=PTR)
    assert (out - without).abs().max() > 0.01


def test_without_pairs_the_correction_changes_nothing():
    layer = make("linear")
    x, positions, cell = draw()
    correction = PairCorrection(H, generator=seeded(3)).double()
    pairs = neighbor_pairs(positions, cell, PBC, PTR, 0.1)
    weights = correction(pairs, pairs.vectors(positions, cell, PTR))
    assert weights.weight.shape == (0, H)
    torch.testing.assert_close(
        layer(x, positions, ptr=PTR, pairs=weights), layer(x, positions, ptr=PTR)
    )


def images_by_enumeration(layer, keys, x, positions, cell, pbc, cutoff):
    """Σ_T exp(q·k/√D + f(r_i − r_j − T)) w(r), one system, T over all that may count."""
    q, k, v = (f(x).view(len(x), H, -1) for f in (layer.query, layer.key, layer.value))
    spans = [range(-5, 6) if periodic else (0,) for periodic in pbc.tolist()]
    total = 0.0
    for shift in itertools.product(*spans):
        d = positions[:, None] - positions - torch.tensor(shift, dtype=F64) @ cell
        r = d.square().sum(-1).clamp(min=1e-30).sqrt()
        u = (r / cutoff).clamp(max=1.0)
        # The window's definition is the library's own; its zero beyond the cutoff is what counts.
        inside = (r < cutoff)[..., None]
        window = torch.where(inside[..., 0], keys_window(u), torch.zeros_like(u))[..., None]
        total = total + layer.rpe.mask(d).exp() * window
    kernel = torch.einsum("ihd,jhd->ijh", q, k).div(2).exp() * total
    attended = torch.einsum("ijh,jhd->ihd", kernel / kernel.sum(1, keepdim=True), v)
    return layer.out(attended.flatten(1))


def keys_window(u):
    from flt_mol.nn.radial import smooth_cutoff

    return smooth_cutoff(u, 1.0)


def test_image_keys_are_a_lattice_sum_under_the_softmax():
    layer, cutoff = make("exact"), 6.0
    x, positions, cell = draw()
    keys = ImageKeys(layer.rpe, cutoff)
    pairs = neighbor_pairs(positions, cell, PBC, PTR, cutoff, self_pairs=True)
    vectors = pairs.vectors(positions, cell, PTR)
    expected = torch.cat(
        [
            images_by_enumeration(layer, keys, x[a:b], positions[a:b], cell[i], PBC[i], cutoff)
            for i, (a, b) in enumerate(((0, 4), (4, 9)))
        ]
    )
    out = layer(x, ptr=PTR, images=keys(pairs, vectors))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


def test_image_keys_are_the_same_in_a_supercell():
    layer, cutoff = make("exact"), 6.0
    x, positions, cell = (y[:4] for y in draw())
    cell, pbc = cell[:1], PBC[:1]
    keys = ImageKeys(layer.rpe, cutoff)

    def run(rows, places, lattice):
        ptr = torch.tensor([0, len(rows)])
        pairs = neighbor_pairs(places, lattice, pbc, ptr, cutoff, self_pairs=True)
        return layer(rows, ptr=ptr, images=keys(pairs, pairs.vectors(places, lattice, ptr)))

    expected = run(x, positions, cell)
    for repeats in ((2, 2, 1), (2, 2, 2)):
        shifts = torch.tensor(list(itertools.product(*map(range, repeats))), dtype=F64) @ cell[0]
        places = (positions + shifts[:, None]).reshape(-1, 3)
        lattice = cell * torch.tensor(repeats)[:, None]
        out = run(x.repeat(len(shifts), 1), places, lattice)
        torch.testing.assert_close(out, expected.repeat(len(shifts), 1), rtol=0, atol=1e-10)


def test_combinations_without_a_meaning_are_refused():
    x, positions, cell = draw()
    correction = PairCorrection(H, generator=seeded(3)).double()
    pairs = neighbor_pairs(positions, cell, PBC, PTR, 6.0, self_pairs=True)
    vectors = pairs.vectors(positions, cell, PTR)
    weights = correction(pairs, vectors)
    layer = make("linear")
    images = ImageKeys(layer.rpe)(pairs, vectors)
    with pytest.raises(ValueError, match="images go with mode 'exact'"):
        layer(x, positions, ptr=PTR, images=images)
    for wrong in (make("auto"), make("linear", causal=True)):
        with pytest.raises(ValueError, match="pairs are among rows of one set"):
            wrong(x, positions, ptr=PTR, pairs=weights)
    system = torch.tensor([1, 0, 1, 0, 0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="sort rows by system"):
        layer(x, positions, system=system, pairs=weights)


def test_kernel_attention_is_what_no_correction_gives():
    """The explicit form above, once more by the library's own reference."""
    layer = make("linear")
    x, positions, _ = draw()
    at = layer.rpe(positions, PTR)
    q, k, v = (f(x).view(9, H, -1) for f in (layer.query, layer.key, layer.value))
    phi = [layer.feature_map(y, at, key=key).exp() for y, key in ((q, False), (k, True))]
    truth = layer.out(kernel_attention(*phi, v, PTR).flatten(1))
    torch.testing.assert_close(layer(x, positions, ptr=PTR), truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["pairs", "images"])
def test_pairs_of_another_batch_are_refused(name):
    layer = make("exact")
    x, positions, _ = draw()
    at = None if name == "images" else positions

    def call(i, j, heads=H, ptr=PTR):
        index_i, index_j = torch.tensor(i), torch.tensor(j)
        weights = PairWeights(index_i, index_j, torch.zeros(len(i), heads, dtype=F64))
        return layer(x, at, ptr=ptr, **{name: weights})

    assert call([0, 8], [3, 4]).shape == x.shape
    with pytest.raises(ValueError, match=f"{name} join rows that are not of one system"):
        call([0, 9], [3, 4])
    with pytest.raises(ValueError, match=f"{name} join rows that are not of one system"):
        call([0, -1], [3, 4])
    with pytest.raises(ValueError, match=f"{name} join rows that are not of one system"):
        call([0], [4])
    with pytest.raises(ValueError, match=f"{name} join rows .* twice"):
        call([0, 8, 0], [3, 4, 3])
    with pytest.raises(ValueError, match=f"{name} have indices"):
        call([0], [3], heads=1)
