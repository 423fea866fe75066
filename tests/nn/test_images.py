import pytest
import torch
from periodic import F64, batch, lengths, over_images, rotation, seeded, supercell

from flt_mol.functional import image_attention, neighbor_pairs
from flt_mol.nn import GaussianBias, GaussianSpectrum, ImageKeys

C, H, T, CUTOFF = 6, 2, 8, 4.2


def bias_of(pair_types=True, **settings):
    return GaussianBias(H, T, CUTOFF, pair_types, generator=seeded(4), **settings).double()


def keys_of():
    return ImageKeys(GaussianSpectrum(H, num_terms=3, generator=seeded(2)), CUTOFF).double()


def attend(keys, positions, cell, pbc, ptr, qkv):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    return image_attention(*qkv, ptr, *keys(pairs, pairs.vectors(positions, cell, ptr)))


def draw(rows):
    return torch.randn(3, rows, H, 4, generator=seeded(6), dtype=F64)


def test_keys_of_images_are_a_multiplicative_lattice_sum():
    keys, (positions, cell, pbc, ptr) = keys_of(), batch((5, 0, 1, 4))
    q, k, v = draw(10)
    weight = torch.zeros(10, 10, H, dtype=F64)
    for rows, _, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        u = (lengths(vectors) / CUTOFF).clamp(max=1)
        window = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
        terms = keys.source.mask(vectors.reshape(-1, 3)).view(*u.shape, H).exp()
        weight[rows, rows] = weight[rows, rows] + terms * window[..., None]
    weight = weight * torch.einsum("ihd,jhd->ijh", q, k).mul(0.5).exp()
    expected = torch.einsum("ijh,jhd->ihd", weight / weight.sum(1, keepdim=True), v)
    found = attend(keys, positions, cell, pbc, ptr, (q, k, v))
    torch.testing.assert_close(found, expected)


def test_supercells_and_rotations_give_the_same():
    keys, (positions, cell, _, ptr) = keys_of(), batch((5,))
    pbc, qkv, turn = torch.ones(1, 3, dtype=torch.bool), draw(5), rotation()
    expected = attend(keys, positions, cell, pbc, ptr, qkv)
    turned = attend(keys, positions @ turn.T, cell @ turn.T, pbc, ptr, qkv)
    torch.testing.assert_close(turned, expected)
    tiled, large, ptr = supercell(positions, cell, (2, 1, 2))
    found = attend(keys, tiled, large, pbc, ptr, [x.repeat(4, 1, 1) for x in qkv])
    torch.testing.assert_close(found, expected.repeat(4, 1, 1))


def test_the_mask_of_a_module_trains_with_the_keys():
    spectrum = GaussianSpectrum(H, num_terms=3, generator=seeded(2))
    assert set(ImageKeys(spectrum).state_dict()) == {f"source.{n}" for n in spectrum.state_dict()}


def test_keys_that_do_not_fit():
    with pytest.raises(ValueError, match="cutoff"):
        ImageKeys(GaussianSpectrum(H), cutoff=-1.0)
    positions, cell, pbc, ptr = batch((5,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    vectors = pairs.vectors(positions, cell, ptr)
    with pytest.raises(ValueError, match="self_pairs"):
        keys_of()(pairs, vectors)


@pytest.mark.parametrize("pair_types", [False, True])
def test_the_bias_is_that_of_the_formula(pair_types):
    layer = bias_of(pair_types)
    r = torch.linspace(0, 5, 7, dtype=F64)
    i, j = torch.arange(1, 8), torch.arange(20, 27)
    with torch.no_grad():
        layer.centre += 0.1
        layer.log_width += 0.2
    a, b = torch.ones(7, dtype=F64), torch.zeros(7, dtype=F64)
    if pair_types:
        types = layer.pair_types
        a = 1 + (types.scale_receiver[i] * types.scale_sender[j]).sum(-1)
        b = (types.shift_receiver[i] * types.shift_sender[j]).sum(-1)
    g = torch.exp(-(((a * r + b)[:, None] - layer.centre) ** 2) / (2 * layer.log_width.exp() ** 2))
    hidden = g @ layer.hidden.weight.T + layer.hidden.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    expected = hidden @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer.bias(layer.features(r, i, j)), expected)


def test_the_density_is_the_sum_over_images_and_the_same_in_supercells():
    layer, (positions, cell, pbc, ptr) = bias_of(False, embed_dim=C), batch((4, 0, 3))

    def density(positions, cell, pbc, ptr):
        pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF + 1, self_pairs=True)
        numbers = torch.ones(len(positions), dtype=torch.int64)
        return layer(pairs, pairs.vectors(positions, cell, ptr), numbers)[1]

    expected = torch.zeros(7, T, dtype=F64)
    for rows, shift, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)
        u = (r / CUTOFF).clamp(max=1)
        other = 1 - torch.eye(len(r), dtype=F64) * (not shift.any())
        window = (1 - 10 * u**3 + 15 * u**4 - 6 * u**5) * other
        expected[rows] += (
            layer.features(r.flatten(), None, None).view(*r.shape, T) * window[..., None]
        ).sum(1)
    found = density(positions, cell, pbc, ptr)
    torch.testing.assert_close(found, layer.density_out(expected))
    tiled, large, many = supercell(positions[:4], cell[:1], (1, 2, 1))
    again = density(tiled, large, pbc[:1], many)
    torch.testing.assert_close(again, found[:4].repeat(2, 1))


def test_biases_that_do_not_fit():
    for wrong in ({"num_heads": 0}, {"cutoff": 0.0}, {"num_basis": 1}, {"embed_dim": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GaussianBias(**{"num_heads": H, **wrong})
