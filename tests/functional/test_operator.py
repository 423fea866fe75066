"""What all operators refuse: forward mode, and offsets that do not describe the rows."""

import math
import sys

import pytest
import torch
from flt_mol.functional.ragged import ragged_layout, ragged_product
from flt_mol.functional.shared import joint_product, shared_product
from periodic import batch, seeded
from torch.autograd import forward_ad

from flt_mol.functional.causal import causal_attention, causal_log_attention
from flt_mol.functional.exact import exact_attention
from flt_mol.functional.feature_maps import stabilised_features
from flt_mol.functional.images import image_attention
from flt_mol.functional.linear import linear_attention, read_back
from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.functional.pairs import pair_dots, pair_filter, pair_sums, weighted_sum
from flt_mol.functional.spectral import (
    kernel_filter,
    kernel_matrices,
    lattice_waves,
    structure_factor_filter,
)
from flt_mol.nn.spectral_filter import SpectralFilter

# Torch's own rules for forward mode are scripts, and it warns of them when it loads them.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

N, H, D = 5, 2, 3
PTR = torch.tensor([0, 2, 5])
IJ = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 1, 1, 4])
LAYOUT = ragged_layout(PTR, torch.tensor([0, 1, 3]))
SIZE = int(LAYOUT[2, -1])
WAVES = torch.cat([LAYOUT[:1], 2 * LAYOUT[1:]])
SQUARE = ragged_layout(PTR, PTR)


LAYER = SpectralFilter(H * D, H, generator=seeded()).double()
GEOMETRY = LAYER.geometry(*batch((N,)))


def draw(*shape):
    """Numbers in [0, 1] without a generator, which torch.func does not let functions use."""
    steps = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return steps.sin().square().reshape(shape)


FAMILIES = {
    "linear": lambda x: linear_attention(x, x, x, PTR),
    "exact": lambda x: exact_attention(x, x, x, PTR),
    "causal": lambda x: causal_attention(x, x, x, PTR),
    "causal, log": lambda x: causal_log_attention(x, x, x, PTR),
    "stabilised": lambda x: stabilised_features(x, x, PTR)[0],
    "shared": lambda x: shared_product(x.flatten(1), draw(H, H * D, 4)),
    "joint": lambda x: joint_product(draw(N, 4), draw(H, 4, 6), x.transpose(0, 1), draw(H, D, 6)),
    "pair filter": lambda x: pair_filter(draw(4, 7), draw(7, H * D), x.flatten(1), *IJ, N),
    "pair dots": lambda x: pair_dots(x, x, *IJ),
    "weighted sum": lambda x: weighted_sum(draw(4, H), x, *IJ, N),
    "pair sums": lambda x: pair_sums(x, x, x, draw(4, H), *IJ),
    "images": lambda x: image_attention(x, x, x, PTR, *IJ, draw(4, H)),
    "ragged": lambda x: ragged_product(draw(H, SIZE), x[:3], LAYOUT, N),
    "waves": lambda x: lattice_waves(x.flatten(1)[:, :3], torch.ones(3, 3).long(), LAYOUT, SIZE),
    "structure factors": lambda x: structure_factor_filter(x, draw(3, H), draw(1, 2 * SIZE), WAVES),
    "kernels": lambda x: kernel_filter(
        x, draw(H, 2), kernel_matrices(draw(1, 2 * SIZE), draw(3, 2), WAVES, 13), SQUARE
    ),
    "kernel matrices": lambda x: kernel_matrices(
        x.reshape(1, -1)[:, : 2 * SIZE], draw(3, 2), WAVES, 13
    ),
    "spectral filter": lambda x: LAYER.convolve(x, GEOMETRY),
}
EACH = pytest.mark.parametrize("name", FAMILIES)


def by_jvp(function, x):
    torch.func.jvp(function, (x,), (torch.ones_like(x),))


def by_jacfwd(function, x):
    torch.func.jacfwd(function)(x)


def by_dual_numbers(function, x):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, torch.ones_like(x)))


@EACH
def test_forward_mode_is_refused_and_reverse_mode_works(name):
    function, x = FAMILIES[name], draw(N, H, D)
    if name == "kernel matrices":
        x = draw(8, H, D)
    (jacobian,) = torch.autograd.functional.jacobian(function, (x,))
    assert (jacobian != 0).any()
    for forward in (by_jvp, by_jacfwd, by_dual_numbers):
        with pytest.raises(NotImplementedError, match=r"reverse mode, torch.autograd.grad"):
            forward(function, x)
    assert function(x).isfinite().all()  # and nothing is left of it


def test_gradients_of_which_a_tangent_is_asked_are_refused_too():
    x = draw(H, N, D).requires_grad_()
    out = read_back(x, x, x, PTR, PTR)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad(out, x, cotangent)


OFFSETS = {
    "too long": [0, 3, 9],
    "decreasing": [0, 4, 2],
    "not from 0": [1, 3, 5],
    "negative": [0, -1, 5],
}
IN_GRAPHS = ("linear", "exact", "causal", "causal, log", "stabilised", "images")


@pytest.mark.parametrize("bad", OFFSETS)
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_offsets_that_do_not_describe_the_rows_are_refused_where_a_graph_runs(name, bad):
    weight = draw(4, H)

    def function(x, ptr):
        return {
            "linear": lambda: linear_attention(x, x, x, ptr),
            "exact": lambda: exact_attention(x, x, x, ptr),
            "causal": lambda: causal_attention(x, x, x, ptr),
            "causal, log": lambda: causal_log_attention(x, x, x, ptr),
            "stabilised": lambda: stabilised_features(x, x, ptr)[0],
            "images": lambda: image_attention(x, x, x, ptr, *IJ, weight),
        }[name]()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x = draw(N, H, D)
    torch.testing.assert_close(compiled(x, PTR), function(x, PTR))
    with pytest.raises(ValueError, match="ptr must start at 0, never decrease and not end beyond"):
        compiled(x, torch.tensor(OFFSETS[bad]))
    torch._dynamo.reset()


def test_offsets_of_keys_are_refused_by_name_and_other_numbers_of_systems():
    x = draw(H, N, D)
    with pytest.raises(ValueError, match="key_ptr must start at 0"):
        read_back(x, x, x, PTR, torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="ptr describes 2 systems, key_ptr 1"):
        read_back(x, x, x, PTR, torch.tensor([0, 5]))


def test_pairs_of_large_systems_are_not_found_without_vesin_and_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "vesin", None)
    assert len(neighbor_pairs(*batch((3,)), 3.0).index_i) > 0
    with pytest.raises(ImportError, match="pip install vesin"):
        neighbor_pairs(*batch((1500,)), 3.0)
