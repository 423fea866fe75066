import itertools

import pytest
import torch
from periodic import F64, batch, kept_sizes, lengths, over_images, rotation, seeded, supercell

from flt_mol.functional import neighbor_pairs, pair_sums
from flt_mol.functional.linear import linear_sums, normalised
from flt_mol.nn import LocalBasis, LocalFilter, PairCorrection

C, D, H, T, TV, CUTOFF = 6, 3, 2, 8, 4, 4.2
SIZES = (5, 0, 1, 6)
KINDS = {
    "sums": {"vectors": 0, "pair_types": False},
    "vectors": {"vectors": D, "pair_types": False},
    "vectors, types": {"vectors": D, "pair_types": True},
}
EACH = pytest.mark.parametrize("kind", KINDS)


class Local(torch.nn.Module):
    """A basis and a filter on it."""

    def __init__(self, vectors, pair_types):
        super().__init__()
        functions = TV if vectors else 0
        self.basis = LocalBasis(CUTOFF, T, functions, pair_types, seeded(2))
        self.filter = LocalFilter(C, T, vectors, functions, seeded(3), num_filters=C + 1)

    def forward(self, x, pairs, vectors, z):
        return self.filter(x, self.basis(pairs, vectors, z))


def make(kind, dtype=F64):
    return Local(**KINDS[kind]).to(dtype).eval()


def draw(rows=12, dtype=F64):
    generator = seeded(1)
    x = torch.randn(rows, C, generator=generator, dtype=F64).to(dtype)
    return x, torch.randint(1, 119, (rows,), generator=generator)


def apply(module, x, z, positions, cell, pbc, ptr):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    return module(x, pairs, pairs.vectors(positions, cell, ptr), z)


def gaussians(basis, r, z):
    """B_t without the cutoff, (n, n, T)."""
    if (types := basis.pair_types) is not None:
        a = 1 + types.scale_receiver[z] @ types.scale_sender[z].T
        r = a * r + types.shift_receiver[z] @ types.shift_sender[z].T
    spacing = CUTOFF / (basis.num_basis - 1)
    centres = spacing * torch.arange(basis.num_basis, dtype=r.dtype)
    return (-((r[..., None] - centres) ** 2) / (2 * spacing**2)).exp()


def explicit(module, x, z, positions, cell, pbc, ptr):
    """A loop over images T, filters of every pair written out, (n, n, C)."""
    local, radial = module.filter, module.basis.radial
    value = local.value(x)
    summed = torch.zeros_like(value)
    arrows = torch.zeros(len(x), D, 3, dtype=x.dtype)
    for rows, shift, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)
        other = 1 - torch.eye(len(r), dtype=x.dtype) * (not shift.any())
        u = (r / CUTOFF).clamp(max=1)
        window = ((1 - 10 * u**3 + 15 * u**4 - 6 * u**5) * other)[..., None]
        basis, index = gaussians(radial, r, z[rows]), torch.arange(rows.start, rows.stop)
        filters = (basis @ (5.0 * local.weight)) * window
        summed = summed.index_add(0, index, torch.einsum("ijc,jc->ic", filters, value[rows]))
        if local.vectors:
            unit = vectors / torch.where(r == 0, 1.0, r)[..., None]
            filters = gaussians(module.basis.vector_radial, r, z[rows]) @ local.vector_weight
            terms = torch.einsum(
                "ijc,ija,jc->ica", filters * window, unit, local.vector_value(x)[rows]
            )
            arrows = arrows.index_add(0, index, terms)
    parts = [summed, x]
    if local.vectors:
        size = 1 + arrows.square().sum(-1)
        mixed = torch.einsum("dc,nca->nda", local.vector_mix.weight, arrows)
        parts[1:1] = [(size - 1) / size, (arrows * mixed).sum(-1) / size]
    return local.out(torch.cat(parts, -1))


@EACH
@pytest.mark.parametrize(("dtype", "error"), [(F64, 1e-10), (torch.float32, 2e-4)])
def test_values_and_gradients_are_those_of_the_sum_over_images(kind, dtype, error):
    module, (x, z) = make(kind, dtype), draw(dtype=dtype)
    positions, cell, pbc, ptr = batch(SIZES)
    positions, cell = (a.to(dtype).requires_grad_() for a in (positions, cell))
    x.requires_grad_()
    out, expected = (f(module, x, z, positions, cell, pbc, ptr) for f in (apply, explicit))
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=error)
    inputs = [x, positions, cell, *module.parameters()]
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64).to(dtype)
    for one, other in zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        assert (one != 0).any()
        torch.testing.assert_close(one, other, rtol=error, atol=20 * error)


@EACH
def test_outputs_are_invariant_and_the_same_in_supercells(kind):
    module, (x, z) = make(kind), draw(5)
    positions, cell, _, ptr = batch((5,))
    pbc, turn = torch.tensor([[True, True, False]]), rotation(3)
    expected = apply(module, x, z, positions, cell, pbc, ptr)
    steps = (torch.randint(-5, 6, (5, 3), generator=seeded()) * pbc).double()
    change = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=F64)
    for at, box in (
        (positions @ turn.T, cell @ turn.T),
        (-positions, -cell),
        (positions + 50.0, cell),
        (positions + steps @ cell[0], cell),
        (positions, change @ cell),
    ):
        found = apply(module, x, z, at, box, pbc, ptr)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    order = torch.tensor([3, 1, 4, 0, 2])
    found = apply(module, x[order], z[order], positions[order], cell, pbc, ptr)
    torch.testing.assert_close(found, expected[order], rtol=0, atol=1e-10)
    tiled, box, ptr = supercell(positions, cell, (2, 3, 1))
    found = apply(module, x.repeat(6, 1), z.repeat(6), tiled, box, pbc, ptr)
    torch.testing.assert_close(found, expected.repeat(6, 1), rtol=0, atol=1e-10)


@EACH
def test_gradients_of_forces(kind):
    module, (x, z) = make(kind), draw(4)
    positions, cell, pbc, ptr = batch((4,), seed=2)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)

    def forces(r):
        out = module(x, pairs, pairs.vectors(r, cell, ptr), z).sin().sum()
        return torch.autograd.grad(out, r, create_graph=True)[0]

    assert torch.autograd.gradcheck(forces, positions.requires_grad_(), fast_mode=True)


@EACH
def test_pairs_beyond_the_cutoff_and_systems_beside_do_not_count(kind):
    module, (x, z) = make(kind), draw()
    positions, cell, pbc, ptr = batch(SIZES)
    near = apply(module, x, z, positions, cell, pbc, ptr)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF + 1.5)
    far = module(x, pairs, pairs.vectors(positions, cell, ptr), z)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-12)
    for b, (start, stop) in enumerate(itertools.pairwise(ptr.tolist())):
        rows, one = slice(start, stop), slice(b, b + 1)
        alone = apply(
            module, x[rows], z[rows], positions[rows], cell[one], pbc[one], ptr[b : b + 2] - start
        )
        torch.testing.assert_close(near[rows], alone, rtol=0, atol=1e-12)


def test_coincident_atoms_have_no_direction_and_no_nan():
    module, (x, z) = make("vectors"), draw(3)
    positions = torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=F64, requires_grad=True)
    out = apply(module, x, z, positions, None, None, torch.tensor([0, 3]))
    (gradient,) = torch.autograd.grad(out.sum(), positions)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_no_number_per_pair_and_channel_is_kept():
    module = LocalFilter(64, T, generator=seeded())
    positions, cell, pbc, ptr = batch((30,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    local = LocalBasis(CUTOFF, T)(pairs, pairs.vectors(positions, cell, ptr))
    x = torch.randn(30, 64, requires_grad=True)
    assert max(kept_sizes(lambda: module(x, local))) < len(pairs.index_i) * 64 / 4


def test_dropout_of_invariants_in_training_only():
    module = LocalFilter(C, T, D, TV, seeded(), vector_dropout=0.9).double()
    positions, cell, pbc, ptr = batch((5,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    local = LocalBasis(CUTOFF, T, TV)(pairs, pairs.vectors(positions, cell, ptr))
    x, _ = draw(5)
    assert not torch.equal(module(x, local), module(x, local))
    module.eval()
    assert torch.equal(module(x, local), module(x, local))


def test_weights_and_their_names():
    names = {"weight", "value.weight", "out.0.weight", "out.0.bias", "out.2.weight", "out.2.bias"}
    assert set(LocalFilter(C, T).state_dict()) == names
    vectors = {"vector_weight", "vector_value.weight", "vector_mix.weight"}
    assert set(LocalFilter(C, T, D, TV).state_dict()) == names | vectors
    assert set(PairCorrection(H).state_dict()) == {"weight"}


@pytest.mark.parametrize("bound", [0.5, 5.0])
def test_the_correction_is_exact_attention_with_the_bounded_mask(bound, monkeypatch):
    monkeypatch.setattr(PairCorrection, "BOUND", bound)
    layer = PairCorrection(H, CUTOFF, T, generator=seeded()).double()
    positions, cell, pbc, ptr = batch((4, 3))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    weights = layer(pairs, pairs.vectors(positions, cell, ptr))
    q, k = torch.rand(2, 7, H, 5, generator=seeded(), dtype=F64)
    v = torch.randn(7, H, 3, generator=seeded(), dtype=F64)
    sums = linear_sums(q, k, v, ptr)
    sums = sums + pair_sums(q, k, v, weights.weight, weights.index_i, weights.index_j)
    total = torch.zeros(7, 7, H, dtype=F64)
    for rows, shift, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)
        u = (r / CUTOFF).clamp(max=1)
        other = 1 - torch.eye(len(r), dtype=F64) * (not shift.any())
        window = (1 - 10 * u**3 + 15 * u**4 - 6 * u**5) * other
        terms = gaussians(layer.basis, r, None) @ layer.weight * window[..., None]
        total[rows, rows] = total[rows, rows] + terms
    f = bound * torch.tanh(total / bound)
    system = torch.tensor([0] * 4 + [1] * 3)
    weight = torch.einsum("ihm,jhm->ijh", q, k) * f.exp() * (system[:, None] == system)[..., None]
    expected = torch.einsum("ijh,jhd->ihd", weight / weight.sum(1, keepdim=True), v)
    torch.testing.assert_close(normalised(sums), expected)


def test_what_does_not_fit():
    for wrong in ({"channels": 0}, {"num_basis": 0}, {"num_filters": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LocalFilter(**{"channels": C, **wrong})
    with pytest.raises(ValueError, match="vector_basis"):
        LocalFilter(C, vectors=2)
    positions, cell, pbc, ptr = batch((5,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    vectors = pairs.vectors(positions, cell, ptr)
    local = LocalBasis(CUTOFF, T)(pairs, vectors)
    with pytest.raises(ValueError, match="vectors"):
        LocalFilter(C, T, D, TV).double()(draw(5)[0], local)
    with pytest.raises(ValueError, match="x has shape"):
        LocalFilter(C + 1, T).double()(draw(5)[0], local)
