import copy
import itertools
import math

import pytest
import torch
from periodic import F64, batch, lengths, over_images, rotation, seeded, supercell

from flt_mol.functional.images import image_attention
from flt_mol.functional.neighbors import neighbor_pairs, pair_lengths
from flt_mol.nn.gaussian_bias import GaussianBias
from flt_mol.nn.image_keys import ImageKeys

C, H, T, CUTOFF = 6, 2, 8, 4.2
SIZES = (5, 0, 1, 6)


def make(pair_types=True, dtype=F64, **settings):
    layer = GaussianBias(
        H, T, CUTOFF, pair_types, **{"embed_dim": C, "generator": seeded(3), **settings}
    ).to(dtype)
    with torch.no_grad():  # away from the start, where biases are 0 and widths are alike
        for x in layer.parameters():
            x.add_(0.1 * torch.randn(x.shape, generator=seeded(x.numel())))
    return layer


def elements(rows):
    return torch.randint(1, 119, (rows,), generator=seeded(1))


def both(layer, z, positions, cell, pbc, ptr, self_pairs=False, cutoff=CUTOFF):
    """Σ_j f_ij w_ij over the pairs, (N, H), which any change of f shows in, and the density."""
    pairs = neighbor_pairs(positions, cell, pbc, ptr, cutoff, self_pairs=self_pairs)
    r = pair_lengths(pairs.vectors(positions, cell, ptr))
    features = layer.features(r, z[pairs.index_i], z[pairs.index_j])
    density = layer.density(features, r, pairs, len(z))
    weighted = layer.bias(features) * window(r)[:, None]
    summed = weighted.new_zeros(len(z), H).index_add(0, pairs.index_i, weighted)
    return summed, density


def window(r):
    u = (r / CUTOFF).clamp(max=1.0)
    return 1 - 10 * u**3 + 15 * u**4 - 6 * u**5


def gaussians(layer, r, z):
    """G_t of all pairs of atoms (n, n, T), as the docstring has it."""
    types = layer.pair_types
    if types is not None:
        a = 1 + types.scale_receiver[z] @ types.scale_sender[z].T
        r = a * r + types.shift_receiver[z] @ types.shift_sender[z].T
    width = layer.log_width.exp()
    return (-((r[..., None] - layer.centre) ** 2) / (2 * width**2)).exp()


def both_by_images(layer, z, positions, cell, pbc, ptr):
    summed, density = torch.zeros(len(z), H, dtype=F64), torch.zeros(len(z), T, dtype=F64)
    for rows, shift, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)
        basis = gaussians(layer, r, z[rows])
        weight = window(r) if shift.any() else window(r) * (1 - torch.eye(len(r)))
        hidden = basis @ layer.hidden.weight.T + layer.hidden.bias
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        f = hidden @ layer.out.weight.T + layer.out.bias
        index = torch.arange(rows.start, rows.stop)
        summed = summed.index_add(0, index, (f * weight[..., None]).sum(1))
        density = density.index_add(0, index, (basis * weight[..., None]).sum(1))
    return summed, density @ layer.density_out.weight.T + layer.density_out.bias


@pytest.mark.parametrize("pair_types", [False, True])
def test_bias_density_and_gradients_are_those_of_the_sum_over_images(pair_types):
    layer, z = make(pair_types), elements(12)
    positions, cell, pbc, ptr = batch(SIZES)
    positions, cell = positions.requires_grad_(), cell.requires_grad_()
    found = both(layer, z, positions, cell, pbc, ptr)
    expected = both_by_images(layer, z, positions, cell, pbc, ptr)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    inputs = [positions, cell, *layer.parameters()]
    seeds = [torch.randn(x.shape, generator=seeded(), dtype=F64) for x in found]
    gradients = torch.autograd.grad(found, inputs, seeds)
    truth = torch.autograd.grad(expected, inputs, seeds)
    assert all((gradient != 0).any() for gradient in gradients)
    torch.testing.assert_close(gradients, truth, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("change", ["rotation", "lattice shifts", "order", "self pairs", "far"])
def test_the_description_of_a_system_does_not_matter(change):
    layer, z, (positions, cell, pbc, ptr) = make(), elements(6), batch((6,))
    order, settings = torch.arange(6), {}
    after, lattice = positions, cell
    if change == "rotation":
        after, lattice = positions @ rotation().T, cell @ rotation().T
    elif change == "lattice shifts":
        steps = torch.randint(-5, 6, (6, 3, 1), generator=seeded())
        after = positions + (steps * cell[0]).sum(1)
    elif change == "order":
        order = torch.tensor([3, 5, 0, 1, 4, 2])
        after = positions[order]
    elif change == "self pairs":
        settings = {"self_pairs": True}
    else:
        settings = {"cutoff": CUTOFF + 1.5}
    out = both(layer, z, positions, cell, pbc, ptr)
    again = both(layer, z[order], after, lattice, pbc, ptr, **settings)
    start = 1 if change == "self pairs" else 0  # the bias of an atom and itself is asked for
    for a, b in list(zip(again, out, strict=True))[start:]:
        torch.testing.assert_close(a, b[order], rtol=0, atol=1e-10)


def test_a_batch_gives_what_its_systems_give_alone():
    layer, z, (positions, cell, pbc, ptr) = make(), elements(12), batch(SIZES)
    together = both(layer, z, positions, cell, pbc, ptr)
    for b, (start, stop) in enumerate(itertools.pairwise(ptr)):
        rows = slice(int(start), int(stop))
        single = (positions[rows], cell[b : b + 1], pbc[b : b + 1])
        alone = both(layer, z[rows], *single, torch.tensor([0, int(stop - start)]))
        torch.testing.assert_close(alone, tuple(x[rows] for x in together), rtol=0, atol=1e-12)


def attended(layer, z, positions, cell, pbc, ptr, x):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    vectors = pairs.vectors(positions, cell, ptr)
    receiver, sender = z[pairs.index_i], z[pairs.index_j]
    keys = ImageKeys(lambda d: layer(pair_lengths(d), receiver, sender), CUTOFF)
    log_weights = keys(pairs, vectors, pairs.groups())
    return image_attention(x, x.sin(), x, ptr, *log_weights).flatten(1)


def test_as_a_mask_of_image_keys_it_is_the_same_in_a_supercell():
    layer, z, (positions, cell, pbc, ptr) = make(), elements(6), batch((6,))
    pbc = torch.ones_like(pbc)
    x = torch.randn(6, H, 3, generator=seeded(), dtype=F64)
    out = attended(layer, z, positions, cell, pbc, ptr, x)
    large, large_cell, large_ptr = supercell(positions, cell, (2, 2, 1))
    again = attended(layer, z.repeat(4), large, large_cell, pbc, large_ptr, x.repeat(4, 1, 1))
    torch.testing.assert_close(again[:6], out, rtol=0, atol=1e-10)
    density = both(layer, z, positions, cell, pbc, ptr)[1]
    again = both(layer, z.repeat(4), large, large_cell, pbc, large_ptr)[1]
    torch.testing.assert_close(again[:6], density, rtol=0, atol=1e-10)


def test_density_ends_smoothly_at_the_cutoff():
    layer, z = make(), torch.tensor([29, 8])
    values = []
    for gap in (1e-2, 1e-5, -1e-5):
        positions = torch.tensor([[0.0, 0, 0], [CUTOFF - gap, 0, 0]], dtype=F64).requires_grad_()
        cell, pbc = torch.eye(3, dtype=F64)[None], torch.zeros(1, 3, dtype=torch.bool)
        pairs = neighbor_pairs(positions, cell, pbc, torch.tensor([0, 2]), CUTOFF + 1)
        r = pair_lengths(pairs.vectors(positions, cell, torch.tensor([0, 2])))
        density = layer.density(layer.features(r, z, z.flip(0)), r, pairs, 2)
        values.append((density.detach(), torch.autograd.grad(density.sum(), positions)[0].norm()))
    (near, slope), (nearer, less), (beyond, none) = values
    bias = layer.density_out.bias.expand(2, C)
    assert 0 < (near - bias).norm() < 1e-6
    torch.testing.assert_close(nearer, bias, rtol=0, atol=1e-12)
    torch.testing.assert_close(beyond, bias, rtol=0, atol=0)
    assert slope > 1e-9 > less >= none == 0


def test_elements_count_and_so_does_who_receives():
    layer = make()
    r = torch.full((3,), 2.0, dtype=F64)
    copper, oxygen, gold = 29, 8, 79
    f = layer(r, torch.tensor([copper, oxygen, copper]), torch.tensor([oxygen, copper, gold]))
    assert (f[0] != f[1]).all()
    assert (f[0] != f[2]).all()


def test_it_starts_with_gaussians_one_spacing_wide_over_the_cutoff():
    layer = GaussianBias(H, 4, 6.0, pair_types=False, generator=seeded())
    r = torch.tensor([0.3, 2.0, 5.5])
    centres = torch.tensor([0.0, 2.0, 4.0, 6.0])
    expected = (-((r[:, None] - centres) ** 2) / (2 * 2.0**2)).exp()
    torch.testing.assert_close(layer.features(r), expected)


def test_no_denormal_numbers_arise():
    layer = make(dtype=torch.float32)
    r = torch.linspace(0, CUTOFF - 1e-6, 4001)
    with torch.no_grad():
        layer.log_width.fill_(-3.0)  # tails of e^-3500
    z = elements(len(r))
    features = layer.features(r, z, z.flip(0))
    index = torch.arange(len(r))
    positions = torch.stack([r, 0 * r, 0 * r], -1)
    pairs = neighbor_pairs(positions[:1], torch.eye(3)[None], torch.zeros(1, 3) > 0,
                           torch.tensor([0, 1]), 1.0)._replace(
        index_i=index, index_j=index.roll(1), shift=torch.zeros(len(r), 3, dtype=torch.int64)
    )  # fmt: skip
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer.density(features, r, pairs, len(r))
    tiny = torch.finfo(torch.float32).tiny
    numbers = [features, *(x for x in kept if x.is_floating_point())]
    assert len(numbers) > 2
    for x in numbers:
        assert not ((x != 0) & (x.abs() < tiny)).any()


def test_precision_is_kept_under_autocast_and_in_half_precision_weights():
    layer, z = make(dtype=torch.float32), elements(12)
    positions, cell, pbc, ptr = batch(SIZES)
    system = positions.float(), cell.float(), pbc, ptr
    expected = both(layer, z, *system)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = both(layer, z, *system)
    for a, b in zip(out, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    half = copy.deepcopy(layer).bfloat16()
    assert {x.dtype for x in both(half, z, *system)} == {torch.float32}
    assert layer(torch.tensor([1.0], dtype=F64), z[:1], z[:1]).dtype == F64


def test_weights_come_from_the_generator_alone():
    state = torch.random.get_rng_state()
    first, again = (GaussianBias(H, T, generator=seeded(5), embed_dim=C) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    other = GaussianBias(H, T, generator=seeded(6), embed_dim=C)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.out.weight, other.out.weight)
    assert GaussianBias(H, T).density_out is None


def test_refusals_say_what_is_missing():
    layer, r = GaussianBias(H, T, generator=seeded()), torch.ones(2)
    with pytest.raises(ValueError, match="needs the atomic numbers"):
        layer(r)
    with pytest.raises(ValueError, match="one for each pair"):
        layer(r, torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(ValueError, match="1 to 118"):
        layer(r, torch.tensor([0, 1]), torch.tensor([1, 1]))
    one = torch.zeros(1, 3), torch.eye(3)[None], torch.zeros(1, 3) > 0, torch.tensor([0, 1])
    pairs = neighbor_pairs(*one, 1.0)
    features = layer.features(r, torch.tensor([1, 1]), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="embed_dim=C"):
        layer.density(features, r, pairs, 1)
    with pytest.raises(ValueError, match="not those of these 0 pairs"):
        make(dtype=torch.float32).density(features, r, pairs, 1)
    for settings in ({"num_heads": 0}, {"num_basis": 1}, {"cutoff": math.inf}, {"embed_dim": 0}):
        with pytest.raises(ValueError, match="(num_heads|num_basis|cutoff|embed_dim)"):
            GaussianBias(**{"num_heads": 2, **settings})


@pytest.mark.parametrize("name", ["hidden", "out", "density_out"])
def test_hooks_of_its_maps_take_effect(name):
    layer, given = make(), batch(SIZES)
    z = elements(len(given[0]))
    before = both(layer, z, *given)
    getattr(layer, name).register_forward_hook(lambda module, args, out: out + 1)
    after = both(layer, z, *given)
    changed = [not torch.equal(x, y) for x, y in zip(after, before, strict=True)]
    assert changed == [name != "density_out", name == "density_out"]
