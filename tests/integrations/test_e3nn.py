import copy
import functools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from periodic import F64, rotation, seeded

from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs
from flt_mol.nn import (
    FourierRPE,
    GaussianFrequencies,
    GaussianSpectrum,
    ImageKeys,
    LocalBasis,
    PairCorrection,
)
from helpers.checks import (
    PaddedLayer,
    check_alone,
    check_autocast,
    check_coincident,
    check_dtype,
    check_gradients,
    check_save_load,
    filled,
)
from helpers.invariances import (
    check_cell_basis,
    check_periodic_images,
    check_permutation,
    check_supercell,
    check_translation,
    random_rows,
)

pytest.importorskip("e3nn")

from e3nn import o3

from flt_mol.integrations.e3nn import (
    IrrepsAttention,
    IrrepsBlock,
    IrrepsFeedForward,
    IrrepsLinear,
    IrrepsNorm,
    IrrepsPairFilter,
)

IRREPS = "6x0e + 2x0o + 3x1o + 2x1e + 2x2e"
DIM, H, T, CUTOFF = 33, 2, 6, 4.0
TURNS = {"turned": rotation(5), "inverted": -torch.eye(3, dtype=F64), "mirrored": -rotation(6)}


class Whole(torch.nn.Module):
    """A layer with all that makes its geometry, called on rows with cells."""

    def __init__(self, layer, correction=None, images=None, rpe=False):
        super().__init__()
        self.layer, self.correction, self.images, self.rpe = layer, correction, images, rpe
        self.basis = LocalBasis(CUTOFF, T, generator=seeded())

    def geometry(self, rows):
        place = (rows.positions, rows.cell, rows.ptr)
        near = neighbor_pairs(rows.positions, rows.cell, rows.pbc, rows.ptr, CUTOFF)
        given = {"ptr": rows.ptr}
        if self.rpe:
            given["positions"] = rows.positions
        if self.correction is not None:
            given["pairs"] = self.correction(near, near.vectors(*place))
        if self.images is not None:
            pairs = neighbor_pairs(*place[:2], rows.pbc, rows.ptr, CUTOFF, self_pairs=True)
            given["images"] = self.images(pairs, pairs.vectors(*place))
        local = self.basis(near, near.vectors(*place))
        return given, local

    def forward(self, rows):
        given, local = self.geometry(rows)
        if isinstance(self.layer, IrrepsPairFilter):
            return self.layer(rows.x, local)
        if isinstance(self.layer, IrrepsBlock):
            return self.layer(rows.x, local=local, **given)
        return self.layer(rows.x, **given)


def attention(generator=1, irreps=IRREPS, **settings):
    return IrrepsAttention(
        irreps, H, head_dim=4, num_features=16, generator=seeded(generator), **settings
    )


def isotropic():
    return ImageKeys(GaussianSpectrum(H, 3, generator=seeded(2)), CUTOFF)


def pair_filter(**settings):
    return IrrepsPairFilter(IRREPS, num_basis=T, generator=seeded(3), **settings)


def block(**settings):
    parts = {"attention": attention(norms=True), "pair_filter": pair_filter(lmax=1), **settings}
    return IrrepsBlock(IRREPS, **parts, generator=seeded(4))


def correction():
    return PairCorrection(H, CUTOFF, T, generator=seeded(5))


MAKERS = {
    "linear": lambda: Whole(attention()),
    "exact": lambda: Whole(attention(mode="exact")),
    "relu, norms": lambda: Whole(
        IrrepsAttention(IRREPS, 3, feature_map="relu", norms=True, generator=seeded(1))
    ),
    "corrected": lambda: Whole(attention(), correction()),
    "images": lambda: Whole(attention(mode="exact"), images=isotropic()),
    "filter": lambda: Whole(pair_filter()),
    "filter, other irreps": lambda: Whole(pair_filter(irreps_out="3x2o + 2x0e + 4x1o", lmax=2)),
    "block": lambda: Whole(block()),
    "block, corrected": lambda: Whole(
        block(irreps_hidden="8x0e+4x0o+4x1o+2x1e+2x2e"), correction()
    ),
    "block, images": lambda: Whole(block(attention=attention(mode="exact")), images=isotropic()),
}
CONSISTENT = ["linear", "images", "filter", "block, images"]


@contextmanager
def float64():
    """e3nn rounds its constants to the default dtype."""
    try:
        torch.set_default_dtype(F64)
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def made(name, dtype=torch.float32):
    with float64() if dtype == F64 else nullcontext():
        return MAKERS[name]()


def rows_of(dtype=torch.float32, periodic=True, sizes=(5, 0, 7, 1), seed=0):
    return random_rows(seeded(seed), sizes, DIM, periodic=periodic, dtype=dtype)


def matrix_of(irreps, turn):
    """D(R): e3nn computes it in the default dtype."""
    with float64():
        return o3.Irreps(irreps).D_from_matrix(turn)


def turned(rows, turn):
    by = turn.to(rows.x.dtype)
    return type(rows)(
        rows.x @ matrix_of(IRREPS, turn).to(rows.x.dtype).T,
        rows.ptr,
        rows.positions @ by.T,
        rows.cell @ by.T,
        rows.pbc,
        rows.atomic_numbers,
    )


def irreps_out(layer):
    return layer.irreps_out if isinstance(layer, IrrepsPairFilter) else layer.irreps


def turning_error(whole, rows, turn):
    """How far f(D x) is from D f(x), of the largest output."""
    with torch.no_grad():
        before, after = whole(rows), whole(turned(rows, turn))
    expected = before @ matrix_of(irreps_out(whole.layer), turn).to(before.dtype).T
    return float((after - expected).abs().max() / before.abs().max())


@pytest.mark.parametrize("name", MAKERS)
def test_outputs_turn_with_the_systems(name):
    whole, rows = made(name, F64), rows_of(F64)
    for turn in (TURNS["turned"], TURNS["mirrored"]):
        assert turning_error(whole, rows, turn) < 1e-10
    check_permutation(whole, rows, tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_outputs_turn_in_float32(name):
    for turn in TURNS.values():
        assert turning_error(made(name), rows_of(), turn) < 1e-4


def test_the_block_claims_what_it_is_for():
    whole, rows = made("block", F64), rows_of(F64, sizes=(3, 2))
    check_translation(whole, rows, tolerance=1e-10)
    check_alone(whole, rows, tolerance=1e-10, larger=5)
    check_gradients(whole, rows)


@pytest.mark.slow
def test_outputs_have_a_direction():
    """Else the test above would pass for layers that give nothing but invariants."""
    for name in MAKERS:
        whole = made(name)
        irreps = irreps_out(whole.layer)
        out = whole(rows_of(sizes=(5,)))
        for part, term in zip(irreps.slices(), irreps, strict=True):
            assert out[:, part].abs().max() > 1e-3, (name, term)


@pytest.mark.slow
def test_sampled_positions_turn_weights_and_keep_translations():
    rpe = FourierRPE(GaussianSpectrum(H, 4), GaussianFrequencies(8, generator=seeded(0)))
    whole = Whole(attention(rpe=rpe, mode="exact"), rpe=True).to(F64)
    open_rows = rows_of(F64, periodic=False)
    assert turning_error(whole, open_rows, TURNS["turned"]) > 1e-3
    assert check_translation(whole, open_rows, tolerance=1e-10) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_symmetries_that_all_layers_have(name):
    whole, rows = made(name, F64), rows_of(F64)
    check_permutation(whole, rows, tolerance=1e-10)
    check_translation(whole, rows, tolerance=1e-10)
    check_alone(whole, rows, tolerance=1e-10)
    check_periodic_images(whole, rows, tolerance=1e-10)
    check_cell_basis(whole, rows, tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSISTENT)
def test_the_same_in_a_supercell(name):
    rows = rows_of(F64, sizes=(3, 2))
    check_supercell(made(name, F64), rows, repeats=[(2, 1, 2)], tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "images", "block"])
def test_numerics(name):
    whole, rows = made(name), rows_of()
    check_gradients(whole, rows, invisible=["*key.bias"] if name == "images" else [])
    check_save_load(whole, lambda: MAKERS[name](), rows)
    check_dtype(whole, rows, tolerance=1e-4)
    check_autocast(whole, rows)
    if name != "linear":
        check_coincident(whole, rows)


def test_random_features_are_drawn_anew_and_shared_positions_serve():
    layer = attention(redraw_every=1).train()
    x, seed = torch.randn(4, DIM, generator=seeded(0)), torch.ones(4, DIM)
    outs = []
    for _ in range(2):
        outs.append(layer(x))
        outs[-1].backward(seed)
    assert not torch.equal(*outs)
    rpe = FourierRPE(GaussianSpectrum(H, 4, generator=seeded(1)), GaussianFrequencies(8))
    shares = attention(position_dim=16)
    r = torch.randn(4, 3, generator=seeded(2))
    owns = attention(rpe=rpe)
    owns.load_state_dict(shares.state_dict(), strict=False)
    torch.testing.assert_close(shares(x, position_features=rpe(r)), owns(x, r))
    assert (owns(x, r) - owns(x, 2 * r)).abs().max() > 1e-4


def test_layouts_agree():
    rows = rows_of(periodic=False)
    layer = attention()
    packed = layer(rows.x, ptr=rows.ptr)
    order = torch.randperm(rows.num_rows, generator=seeded(9))
    mixed = layer(rows.x[order], system=rows.system[order], num_systems=4)
    with pytest.raises(TypeError, match="system=batch"):
        layer(rows.x, batch=rows.system)
    torch.testing.assert_close(mixed, packed[order], rtol=0, atol=1e-5)
    padded = PaddedLayer(layer, lambda m, x, r, mask: m(x, mask=mask))
    out, real = filled(padded, rows, float("nan"))
    torch.testing.assert_close(out[real], packed, rtol=0, atol=1e-6)


def coupled(x, y, path):
    """Components of x ⊗ Y in an irrep, of mean square as e3nn normalises them."""
    l1, l2, l3 = path
    return (2 * l3 + 1) ** 0.5 * torch.einsum(
        "i,j,ijk->k", x, y, o3.wigner_3j(l1, l2, l3, dtype=F64)
    )


def test_filter_is_a_sum_of_tensor_products():
    with float64():
        layer = IrrepsPairFilter("2x0e + 1x1o", "1x0e + 2x1o", 1, T, generator=seeded(0))
    rows = random_rows(seeded(1), (4,), 5, periodic=True, dtype=F64)
    whole = Whole(layer).to(F64)
    _, local = whole.geometry(rows)
    x = layer.value(rows.x)
    silu = torch.nn.functional.silu
    radial = silu(local.basis @ layer.hidden.weight.T) @ layer.weight
    sums = torch.zeros(4, 3 + 9, dtype=F64)
    for p, (i, j) in enumerate(zip(local.pairs.index_i, local.pairs.index_j, strict=True)):
        y0, y1 = torch.ones(1, dtype=F64), 3**0.5 * local.vectors[p] / local.vectors[p].norm()
        scalars, vector = x[j, :2, None], x[j, 2:]
        weight = iter(radial[p])
        # Paths as e3nn orders them: by first factor, then by harmonic.
        a, b, c, d, e, f = (next(weight) for _ in range(6))
        zero = [a * coupled(scalars[0], y0, (0, 0, 0)), b * coupled(scalars[1], y0, (0, 0, 0))]
        one = [c * coupled(scalars[0], y1, (0, 1, 1)), d * coupled(scalars[1], y1, (0, 1, 1))]
        one.append(e * coupled(vector, y0, (1, 0, 1)))
        zero.append(f * coupled(vector, y1, (1, 1, 0)))
        sums[i] += torch.cat(zero + one)
    # Two scalars and one vector lead to each irrep: sums of three channels.
    torch.testing.assert_close(layer(rows.x, local), layer.out(sums), rtol=0, atol=1e-12)


def one_pair(vector, basis, **given):
    index = torch.tensor([0]), torch.tensor([1])
    pairs = NeighborPairs(*index, torch.zeros(1, 3, dtype=torch.int64))
    return basis(pairs, torch.as_tensor([vector], **given))


def test_vectors_are_x_y_z():
    layer = IrrepsPairFilter("1x0e", "1x1o", 1, T, generator=seeded(0))
    out = layer(torch.ones(2, 1), one_pair([1.0, 2.0, -2.0], LocalBasis(CUTOFF, T)))
    assert out[1].abs().max() == 0
    direction = out[0] / out[0].norm() * out[0, 0].sign()
    torch.testing.assert_close(direction, torch.tensor([1.0, 2.0, -2.0]) / 3)


def test_no_distance_has_no_direction():
    layer = IrrepsPairFilter("2x0e", "2x0e + 2x1o + 2x2e", 2, T, generator=seeded(0))
    vector = torch.zeros(1, 3, requires_grad=True)
    pairs = NeighborPairs(torch.tensor([0]), torch.tensor([1]), torch.zeros(1, 3).long())
    out = layer(torch.ones(2, 2), LocalBasis(CUTOFF, T)(pairs, vector))
    assert out[0, :2].abs().min() > 0
    assert out[0, 2:].abs().max() == 0
    (force,) = torch.autograd.grad(out.sum(), vector, create_graph=True)
    assert torch.isfinite(force).all()
    assert torch.isfinite(torch.autograd.grad(force.sum(), layer.weight)[0]).all()


@pytest.mark.slow
def test_nothing_is_added_at_the_cutoff_and_beyond():
    layer, basis = (
        IrrepsPairFilter("2x0e", "2x1o", 1, T, generator=seeded(0)),
        LocalBasis(CUTOFF, T),
    )
    outs = [
        layer(torch.ones(2, 2), one_pair([x, 0.0, 0.0], basis)).abs().max()
        for x in (CUTOFF - 0.5, CUTOFF - 0.02, CUTOFF, CUTOFF + 1)
    ]
    assert outs[0] > 1e-4
    assert outs[1] < 1e-3 * outs[0]
    assert outs[2:] == [0, 0]


@pytest.mark.slow
def test_forces_turn_and_are_those_of_the_energy():
    whole, rows = made("block", F64), rows_of(F64, sizes=(4,))
    readout = torch.randn(6, generator=seeded(7), dtype=F64)

    def energy(positions):
        return (whole(replaced(rows, positions))[:, :6] @ readout).sum()

    positions = rows.positions.clone().requires_grad_()
    assert torch.autograd.gradcheck(energy, (positions,), atol=1e-6)
    (force,) = torch.autograd.grad(energy(positions), positions)
    other = turned(rows, TURNS["mirrored"])
    moved = other.positions.clone().requires_grad_()
    mirrored = (whole(replaced(other, moved))[:, :6] @ readout).sum()
    (expected,) = torch.autograd.grad(mirrored, moved)
    torch.testing.assert_close(force @ TURNS["mirrored"].T, expected, rtol=0, atol=1e-10)


def replaced(rows, positions):
    return type(rows)(rows.x, rows.ptr, positions, rows.cell, rows.pbc, rows.atomic_numbers)


def test_norm_is_torchs_for_scalars_and_one_length_for_the_rest():
    norm = IrrepsNorm("6x0e + 3x1o + 2x0o").to(F64)
    ours = torch.nn.LayerNorm(6, dtype=F64)
    with torch.no_grad():
        norm.weight.normal_(generator=seeded(0))
        norm.bias.normal_(generator=seeded(1))
        ours.weight.copy_(norm.weight[:6])
        ours.bias.copy_(norm.bias)
    x = torch.randn(4, 17, generator=seeded(2), dtype=F64)
    out = norm(x)
    torch.testing.assert_close(out[:, :6], ours(x[:, :6]), rtol=0, atol=1e-12)
    vectors = x[:, 6:15].view(4, 3, 3)
    length = (vectors.square().sum((1, 2)) / 9 + 1e-5).sqrt()
    expected = vectors / length[:, None, None] * norm.weight[6:9, None]
    torch.testing.assert_close(out[:, 6:15], expected.flatten(1), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_norm_and_gate_turn_and_take_zeros():
    for layer in (IrrepsNorm(IRREPS), IrrepsFeedForward(IRREPS, generator=seeded(0))):
        layer = layer.to(F64)
        with torch.no_grad():
            for p in layer.parameters():
                p.normal_(generator=seeded(1))
        x = torch.randn(5, DIM, generator=seeded(2), dtype=F64)
        for turn in TURNS.values():
            by = matrix_of(IRREPS, turn)
            torch.testing.assert_close(layer(x @ by.T), layer(x) @ by.T, rtol=0, atol=1e-10)
        for part in o3.Irreps(IRREPS).slices():
            assert layer(x)[:, part].abs().max() > 1e-3
        zero = torch.zeros(1, DIM, dtype=F64, requires_grad=True)
        assert torch.isfinite(torch.autograd.grad(layer(zero).sum(), zero)[0]).all()


def test_block_is_the_sum_of_its_parts():
    whole, rows = made("block", F64), rows_of(F64)
    _, local = whole.geometry(rows)
    layer, x = whole.layer, rows.x
    first = x + layer.attention(layer.attention_norm(x), ptr=rows.ptr) + layer.pair_filter(x, local)
    torch.testing.assert_close(whole(rows), first + layer.ffn(layer.ffn_norm(first)))


@pytest.mark.parametrize("irreps", ["4x1o", "4x1o + 2x0o", "4x1o + 2x2e", "2x0o"])
def test_irreps_without_scalars(irreps):
    layer = IrrepsBlock(irreps, attention(irreps=irreps, norms=True), generator=seeded(0)).to(F64)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(generator=seeded(1))
    x = torch.randn(3, o3.Irreps(irreps).dim, generator=seeded(2), dtype=F64)
    ptr, out = torch.tensor([0, 3]), None
    for turn in TURNS.values():
        by = matrix_of(irreps, turn)
        out = layer(x, ptr)
        torch.testing.assert_close(layer(x @ by.T, ptr), out @ by.T, rtol=0, atol=1e-10)
    bias = layer.ffn.first.offset
    gates = o3.Irreps(irreps).num_irreps - o3.Irreps(irreps).count("0o")
    assert bias.shape == (gates,)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(layer.state_dict())
    assert torch.equal(copied(x, ptr), out)
    if gates:
        (slope,) = torch.autograd.grad(out.square().sum(), bias)
        assert (slope != 0).all()


@pytest.mark.parametrize("irreps_out", ["3x0e", "2x1o + 3x0e + 2x2e", "1x0e + 2x1o + 2x0e"])
def test_scalars_made_of_nothing_are_their_bias(irreps_out):
    layer = IrrepsLinear("4x1o", irreps_out, bias=True, generator=seeded(0))
    plain = IrrepsLinear("4x1o", irreps_out, generator=seeded(0))
    with torch.no_grad():
        layer.offset.copy_(torch.arange(1.0, 4.0))
    x = torch.randn(5, 12, generator=seeded(1))
    parts = o3.Irreps(irreps_out)
    scalar = torch.cat([torch.full((term.dim,), term.ir.l == 0) for term in parts])
    expected = plain(x)
    expected[:, scalar] = layer.offset.detach()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_multiplicities_are_rounded_up_to_the_heads():
    layer = IrrepsAttention("8x0e + 3x1o + 5x2e", 4)
    assert layer.irreps_value == o3.Irreps("8x0e + 4x1o + 8x2e")


REFUSED = {
    "no invariants": lambda: IrrepsAttention("4x1o", 2),
    "num_heads is 0": lambda: IrrepsAttention("4x0e", 0),
    "mode is 'fast'": lambda: IrrepsAttention("4x0e", 2, mode="fast"),
    "mode 'auto' mixes": lambda: IrrepsAttention("4x0e", 2, mode="auto", feature_map="relu"),
    "hold 0o, 3o: no product": lambda: IrrepsPairFilter("4x0e", "2x0o + 1x1o + 1x3o", 1),
    "give at least one": lambda: IrrepsBlock("4x0e"),
    "IrrepsAttention is of other irreps": lambda: IrrepsBlock("5x0e", IrrepsAttention("4x0e", 2)),
    "IrrepsPairFilter is of other irreps": lambda: IrrepsBlock(
        "4x0e", pair_filter=IrrepsPairFilter("4x0e", "5x0e")
    ),
    "pass local": lambda: block()(torch.ones(2, DIM), torch.tensor([0, 2])),
    "expected .N, 33.": lambda: attention()(torch.ones(2, 5)),
    "shape .2, 5., expected .N, 33.": lambda: block()(torch.ones(2, 5), torch.tensor([0, 2])),
    "shape .2, 6., expected .N, 33.": lambda: IrrepsNorm(IRREPS)(torch.ones(2, 6)),
    "shape .1, 2, 33., expected .N, 33.": lambda: IrrepsNorm(IRREPS)(torch.ones(1, 2, DIM)),
    "shape .2, 7., expected .N, 33.": lambda: IrrepsFeedForward(IRREPS)(torch.ones(2, 7)),
    "shape .2, 5., expected .N, 12.": lambda: IrrepsLinear("4x1o", "2x1o")(torch.ones(2, 5)),
    "without positions": lambda: attention()(torch.ones(2, DIM), torch.ones(2, 3)),
    "positions are missing": lambda: attention(
        rpe=FourierRPE(GaussianSpectrum(H, 2), GaussianFrequencies(3))
    )(torch.ones(2, DIM)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


@pytest.mark.slow
def test_copies_and_pickles_give_the_same(tmp_path):
    whole, rows = made("block"), rows_of()
    torch.save(whole, tmp_path / "whole.pt")
    for other in (
        copy.deepcopy(whole),
        torch.load(tmp_path / "whole.pt", weights_only=False),
    ):
        assert torch.equal(other(rows), whole(rows))


@pytest.mark.slow
def test_weights_follow_their_generator_and_nothing_else_is_drawn():
    state, dtype, threads = (
        torch.get_rng_state(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )
    weights = [MAKERS["block"]().state_dict() for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (dtype, threads)
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight), name
    torch.manual_seed(3)
    first = IrrepsLinear("4x1o", "4x1o").weight
    torch.manual_seed(3)
    assert torch.equal(IrrepsLinear("4x1o", "4x1o").weight, first)


ALONE = """
import sys
import flt_mol
for part in ("functional", "nn", "models", "integrations"):
    __import__(f"flt_mol.{part}")
assert "e3nn" not in sys.modules
import torch
before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
sys.modules["e3nn"] = None
try:
    import flt_mol.integrations.e3nn
except ImportError as error:
    assert "pip install 'flt_mol[e3nn]'" in str(error), error
else:
    raise AssertionError
del sys.modules["e3nn"]
import flt_mol.integrations.e3nn
after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
"""
