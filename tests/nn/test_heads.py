import itertools

import pytest
import torch
from periodic import F64, batch, lengths, over_images, rotation, seeded, supercell

from flt_mol.functional import neighbor_pairs
from flt_mol.nn import ChargeHead, DisplacementHead, EnergyHead, LocalBasis
from flt_mol.nn.embedding import AtomEmbedding, AtomError
from flt_mol.nn.heads import READOUTS

C, T, CUTOFF = 8, 6, 4.2
SIZES = (5, 0, 1, 6)
PTR = torch.tensor([0, *itertools.accumulate(SIZES)])


def draw(rows=12):
    generator = seeded(1)
    x = torch.randn(rows, C, generator=generator, dtype=F64)
    return x, torch.randint(3, (rows,), generator=generator)


def test_embeddings_are_an_element_s_and_a_tag_s_vector():
    embedding = AtomEmbedding(C)
    out = embedding(torch.tensor([29, 118], dtype=torch.int32), torch.tensor([0, 2]))
    for row, (z, tag) in enumerate(((29, 0), (118, 2))):
        assert torch.equal(out[row], embedding.element.weight[z] + embedding.tag.weight[tag])
    assert set(embedding.state_dict()) == {"element.weight", "tag.weight"}


@pytest.mark.parametrize(
    ("numbers", "tags", "named"),
    [
        ([8, 0], [0, 0], "atomic number 0"),
        ([8, 119], [0, 0], "atomic number 119"),
        ([8, 1], [0, 3], "tag 3"),
        ([8, 1], [0, -1], "tag -1"),
    ],
)
def test_atoms_that_are_none_are_named_by_their_row(numbers, tags, named):
    with pytest.raises(AtomError, match=named) as caught:
        AtomEmbedding(C)(torch.tensor(numbers), torch.tensor(tags))
    assert caught.value.row == 1


def test_atoms_of_other_dtypes():
    two = torch.tensor([2, 1])
    for numbers, tags in ((two.to(torch.uint8), two), (two, two.bool()), (two.float(), two)):
        with pytest.raises(RuntimeError, match="Long"):
            AtomEmbedding(C)(numbers, tags)


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("norm", [True, False])
def test_energies_are_those_of_the_formula(readout, num_outputs, norm):
    head = EnergyHead(C, num_outputs, readout, norm).double()
    x, tags = draw()
    with torch.no_grad():
        for k, parameter in enumerate(head.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=seeded(k), dtype=F64)
    out = head(x, tags, PTR)
    assert out.shape == ((4,) if num_outputs == 1 else (4, 3))
    per_atom = head.atom_energy(x)
    if readout == "tags":
        per_atom = per_atom * head.tag_weight.view(3, num_outputs)[tags]
    rows = [per_atom[a:b] for a, b in itertools.pairwise(PTR.tolist())]
    expected = torch.stack([r.sum(0) / (max(1, len(r)) if readout == "mean" else 1) for r in rows])
    torch.testing.assert_close(out.view(expected.shape), expected)
    assert isinstance(head.atom_energy[0], torch.nn.LayerNorm) == norm


def test_tag_weights_begin_with_the_adsorbate_s_the_largest():
    head = EnergyHead(C)
    torch.testing.assert_close(head.tag_weight.detach(), torch.tensor([0.1, 0.3, 1.0]))
    one = torch.ones(3, C)
    e = head.atom_energy(one)[0, 0]
    alone = [head(one[:1], torch.tensor([tag]), torch.tensor([0, 1])) for tag in range(3)]
    torch.testing.assert_close(torch.cat(alone), e * torch.tensor([0.1, 0.3, 1.0]))
    names = {"tag_weight", *(f"atom_energy.{k}.{n}" for k in (0, 1, 3) for n in ("weight", "bias"))}
    assert set(head.state_dict()) == names


def test_autocast_reaches_no_energy():
    head, (x, tags) = EnergyHead(C), draw()
    exact = head(x.float(), tags, PTR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(x.float(), tags, PTR), exact)


def test_energies_that_do_not_fit():
    x, tags = draw()
    for wrong in (tags[:1], tags.to(torch.uint8), None):
        with pytest.raises((ValueError, RuntimeError)):
            EnergyHead(C).double()(x, wrong, PTR)
    for wrong in (tags - 1, tags + 1):
        with pytest.raises(IndexError):
            EnergyHead(C).double()(x, wrong, PTR)
    with pytest.raises(ValueError, match="ptr"):
        EnergyHead(C).double()(x, tags, PTR[:2])
    for wrong in ({"readout": "max"}, {"num_outputs": 0}, {"embed_dim": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EnergyHead(**{"embed_dim": C, **wrong})


@pytest.fixture
def charges():
    """A charge head, atoms in open space, their features and the geometry of any positions."""
    head = ChargeHead(C, 2, 3, (0.25, 4.0, 5), CUTOFF, seeded(2)).double()
    with torch.no_grad():
        head.filter.amplitudes += 0.1 * torch.randn(3, 5, generator=seeded(3), dtype=F64)
        head.weight += 0.1
    cell, open_ = torch.zeros(len(SIZES), 3, 3, dtype=F64), torch.zeros(len(SIZES), 3, dtype=bool)
    positions = 3 * torch.randn(12, 3, generator=seeded(4), dtype=F64)

    def geometry(r):
        pairs = neighbor_pairs(r.detach(), cell, open_, PTR, CUTOFF)
        local = LocalBasis(CUTOFF, T)(pairs, pairs.vectors(r, cell, PTR))
        return head.filter.geometry(r, cell, open_, PTR), local

    return head, positions, draw()[0], geometry


def test_charges_interact_by_their_filter_at_every_distance(charges):
    head, positions, x, geometry = charges
    waves, local = geometry(positions)
    q, w = head.charges(x, local), head.weight
    kernel = head.filter.filter(positions[:, None] - positions)
    system = torch.repeat_interleave(torch.arange(4), PTR.diff())
    kernel = kernel * (system[:, None] == system)[..., None]
    per_atom = torch.einsum("ic,ijc,jc->ic", q, kernel, q) @ w.mT
    expected = torch.zeros(4, 2, dtype=F64).index_add(0, system, per_atom)
    out = head(x, waves, local, PTR)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


def test_half_of_the_charges_flow_between_neighbours_and_keep_molecules_neutral(charges):
    head, positions, x, geometry = charges
    positions = positions / 3
    positions[6:9] += 100.0  # half of the last system
    _, local = geometry(positions)
    q, u = head.charges(x, local), head.potential(x)
    r = lengths(positions[:, None] - positions) / head.cutoff
    s = (1 - 10 * r**3 + 15 * r**4 - 6 * r**5).masked_fill(r >= 1, 0.0)
    system = torch.repeat_interleave(torch.arange(4), PTR.diff())
    s = s * (system[:, None] == system)
    flows = head.FLOW * (s[..., None] * (u - u[:, None])).sum(1)
    torch.testing.assert_close(q, torch.cat([flows[:, :2], u[:, 2:]], 1))
    assert flows.abs().amax(0)[:2].min() > 0.1
    for rows in (slice(0, 5), slice(5, 6), slice(6, 9), slice(9, 12)):
        torch.testing.assert_close(q[rows, :2].sum(0), torch.zeros(2, dtype=F64))


def test_the_first_kernel_of_charges_falls_with_distance():
    head = ChargeHead(C, 1, 4, (0.2, 6.0, 8))
    assert (head.weight.sign() == torch.tensor([0, 0, 1, -1])).all()  # of flowing charges 0
    shells = head.filter
    r = torch.zeros(30, 3)
    r[:, 0] = torch.arange(30) / 2
    f = shells.filter(r)
    assert (f > 0).all()
    assert (f.diff(dim=0) < 0).all()


def test_gradients_of_charges(charges):
    head, positions, x, geometry = charges
    for tensor in (positions, x):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda r, x: head(x, *geometry(r), PTR), (positions, x), fast_mode=True
    )
    with pytest.raises(ValueError, match="charges"):
        ChargeHead(C, 1, 0, (0.25, 4.0, 5))


def head_of():
    head = DisplacementHead(C, T, channels=5, generator=seeded(3)).double()
    with torch.no_grad():
        head.norm.weight += 0.3 * torch.randn(C, generator=seeded(), dtype=F64)
    return head


def displacements(head, x, positions, cell, pbc, ptr, fixed=None):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    local = LocalBasis(CUTOFF, T)(pairs, pairs.vectors(positions, cell, ptr))
    return head(x, local, fixed)


def test_displacements_and_gradients_are_those_of_the_sum_over_images():
    head, (x, _), (positions, cell, pbc, ptr) = head_of(), draw(), batch(SIZES)
    positions.requires_grad_()
    h = head.norm(x)
    strength, value = head.strength(h), head.value(h)
    expected = torch.zeros(12, 3, dtype=F64)
    for rows, _, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)
        u = (r / CUTOFF).clamp(max=1)
        window = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
        spacing = CUTOFF / (T - 1)
        basis = (
            torch.exp(-((r[..., None] / spacing - torch.arange(T)) ** 2) / 2) * window[..., None]
        )
        m = torch.einsum("ic,ijt,tc,jc->ij", strength[rows], basis, head.weight, value[rows])
        arrows = vectors * (r / (r**2 + 0.1**2))[..., None]
        index = torch.arange(rows.start, rows.stop)
        expected = expected.index_add(0, index, (m[..., None] * arrows).sum(1))
    out = displacements(head, x, positions, cell, pbc, ptr)
    torch.testing.assert_close(out, expected)
    inputs = [positions, *head.parameters()]
    for one, other in zip(
        torch.autograd.grad(out.sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_displacements_turn_and_mirror_with_the_system_and_repeat_in_supercells():
    head, (x, _), (positions, cell, pbc, ptr) = head_of(), draw(5), batch((5,))
    expected, turn = displacements(head, x, positions, cell, pbc, ptr), rotation(2)
    for matrix in (turn, -turn):
        out = displacements(head, x, positions @ matrix.T, cell @ matrix.T, pbc, ptr)
        torch.testing.assert_close(out, expected @ matrix.T)
    tiled, large, many = supercell(positions, cell, (2, 1, 1))
    out = displacements(head, x.repeat(2, 1), tiled, large, pbc, many)
    torch.testing.assert_close(out, expected.repeat(2, 1))


def test_fixed_atoms_do_not_move_and_coincident_ones_give_no_nan():
    head, (x, _), (positions, cell, pbc, ptr) = head_of(), draw(), batch(SIZES)
    fixed = torch.arange(12) % 3 == 0
    free = displacements(head, x, positions, cell, pbc, ptr)
    out = displacements(head, x, positions, cell, pbc, ptr, fixed)
    assert not out[fixed].any()
    assert torch.equal(out[~fixed], free[~fixed])
    assert free[fixed].any()
    positions[1] = positions[0]
    positions.requires_grad_()
    out = displacements(head, x, positions, cell, pbc, ptr)
    assert torch.autograd.grad(out.sum(), positions)[0].isfinite().all()


def test_initial_displacements_are_small():
    head, x = DisplacementHead(64, 32, generator=seeded()), torch.randn(40, 64, generator=seeded())
    positions = 8 * torch.rand(40, 3, generator=seeded())
    pbc = torch.ones(1, 3, dtype=torch.bool)
    where = positions, 8 * torch.eye(3)[None], pbc, torch.tensor([0, 40])
    pairs = neighbor_pairs(*where, 6.0)
    local = LocalBasis(6.0, 32)(pairs, pairs.vectors(positions, where[1], where[3]))
    assert 1e-4 < head(x, local).norm(dim=-1).mean() < 0.2


def test_displacements_that_do_not_fit():
    head, (x, _), where = head_of(), draw(), batch(SIZES)
    with pytest.raises(ValueError, match="x has shape"):
        displacements(head, x[:, :-1], *where)
    for name in ("embed_dim", "num_basis", "channels"):
        with pytest.raises(ValueError, match=name):
            DisplacementHead(**{"embed_dim": C, "num_basis": T, name: 0})
