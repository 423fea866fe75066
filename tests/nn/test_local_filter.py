import copy
import itertools

import pytest
import torch
from periodic import (
    F64,
    batch,
    kept_sizes,
    lengths,
    over_images,
    rotation,
    seeded,
    supercell,
)

from flt_mol.functional.neighbors import NeighborPairs, neighbor_pairs
from flt_mol.nn.local import LocalBasis, LocalFilter
from flt_mol.testing import check_matches

C, D, T, T_VECTORS, CUTOFF = 6, 3, 8, 5, 4.2
SIZES = (5, 0, 1, 6)
KINDS = {
    "sums": {},
    "sums, types": {"pair_types": True},
    "more sums": {"num_filters": 9},
    "vectors": {"vectors": D},
    "vectors, types": {"vectors": D, "pair_types": True, "num_filters": 4},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Layer(torch.nn.Module):
    """A basis and a filter on it, from positions to features."""

    def __init__(self, vectors=0, pair_types=False, num_filters=None, vector_dropout=0.0):
        super().__init__()
        width = T_VECTORS if vectors else 0
        self.basis = LocalBasis(CUTOFF, T, width, pair_types, seeded(3))
        more = {"num_filters": num_filters, "vector_dropout": vector_dropout}
        self.filter = LocalFilter(C, T, vectors, width, seeded(4), **more)
        with torch.no_grad():
            self.filter.out[2].bias.normal_(generator=seeded(5))
            self.filter.out[0].weight.normal_(generator=seeded(6))  # vectors begin small

    def geometry(self, z, positions, cell, pbc, ptr, cutoff=CUTOFF):
        pairs = neighbor_pairs(positions, cell, pbc, ptr, cutoff)
        return self.basis(pairs, pairs.vectors(positions, cell, ptr), len(z), z)

    def forward(self, x, z, positions, cell, pbc, ptr, cutoff=CUTOFF):
        return self.filter(x, self.geometry(z, positions, cell, pbc, ptr, cutoff))


def inputs(layer, *given):
    """What the net behind the sums takes, (N, K + 2D + C)."""
    seen = []
    hook = layer.filter.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer(*given)
    hook.remove()
    return seen[0]


def make(kind="vectors", dtype=F64):
    return Layer(**KINDS[kind]).to(dtype)


def draw(rows=12, dtype=F64, seed=1):
    x = torch.randn(rows, C, generator=seeded(seed), dtype=F64).to(dtype)
    return x, torch.randint(1, 119, (rows,), generator=seeded(seed + 1))


def window(r):
    u = (r / CUTOFF).clamp(max=1.0)
    return 1 - 10 * u**3 + 15 * u**4 - 6 * u**5


def gaussians(r, count):
    spacing = CUTOFF / (count - 1)
    centres = spacing * torch.arange(count, dtype=r.dtype)
    return (-((r[..., None] - centres) ** 2) / (2 * spacing**2)).exp()


def transformed(layer, r, z):
    types = layer.basis.radial.pair_types
    if types is None:
        return r
    a = 1 + types.scale_receiver[z] @ types.scale_sender[z].T
    return a * r + types.shift_receiver[z] @ types.shift_sender[z].T


def by_images(layer, x, z, positions, cell, pbc, ptr):
    """A loop over systems and T, with sums over all pairs (n, n) of atoms written out."""
    f = layer.filter
    value, vector_value = x @ f.value.weight.T, None
    summed, vectors = torch.zeros_like(value), None
    if f.vectors:
        vector_value = x @ f.vector_value.weight.T
        vectors = torch.zeros(len(x), f.vectors, 3, dtype=x.dtype)
    for rows, shift, differences in over_images(positions, cell, pbc, ptr, CUTOFF):
        r, index = lengths(differences), torch.arange(rows.start, rows.stop)
        weight = window(r)[..., None]
        if not shift.any():
            weight = weight * (1 - torch.eye(len(r)))[..., None]
        at = gaussians(transformed(layer, r, z[rows]), T) @ f.weight * 5.0 * weight
        summed = summed.index_add(0, index, torch.einsum("ijc,jc->ic", at, value[rows]))
        if f.vectors:
            at = gaussians(r, T_VECTORS) @ f.vector_weight * weight
            unit = differences / torch.where(r == 0, 1.0, r)[..., None]
            found = torch.einsum("ijd,jd,ija->ida", at, vector_value[rows], unit)
            vectors = vectors.index_add(0, index, found)
    parts = [summed]
    if f.vectors:
        mixed = torch.einsum("de,nea->nda", f.vector_mix.weight, vectors)
        size = 1 + (vectors * vectors).sum(-1)
        parts += [(vectors * vectors).sum(-1) / size, (vectors * mixed).sum(-1) / size]
    return f.out(torch.cat([*parts, x], -1))


@every_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 3e-5)])
def test_values_and_gradients_are_those_of_the_formula(kind, dtype, tolerance):
    layer, (x, z) = make(kind, dtype), draw(dtype=dtype)
    positions, cell, pbc, ptr = batch(SIZES)
    inputs = [x, z, positions.to(dtype), cell.to(dtype), pbc, ptr]
    with torch.no_grad():
        out = layer(*inputs)
        assert out.dtype == dtype
        assert (out.std(0) > 1e-3).all()
        changed = Layer(**{**KINDS[kind], "vectors": 0}).to(dtype)(*inputs)
        assert ((out - changed).abs().max() > 1e-2) == ("vectors" in KINDS[kind])
    check_matches(
        layer,
        lambda *given: by_images(layer, *given),
        inputs,
        tolerance,
        parameters=layer.parameters(),
    )


@pytest.mark.parametrize("kind", ["sums, types", "vectors"])
def test_second_gradients_are_those_of_the_formula(kind):
    """What training on forces takes."""
    layer, (x, z), system = make(kind), draw(9), batch((4, 0, 5))
    check_matches(
        layer,
        lambda *given: by_images(layer, *given),
        [x, z, *system],
        1e-9,
        parameters=layer.parameters(),
        second=True,
    )


def test_forces_are_minus_the_slope():
    layer, (x, z), (positions, *rest) = make("vectors, types"), draw(), batch(SIZES)
    leaf = positions.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x, z, leaf, *rest).sin().sum(), leaf)
    for atom, axis in ((0, 0), (4, 2), (8, 1)):
        step = torch.zeros_like(positions)
        step[atom, axis] = 1e-5
        with torch.no_grad():
            up, down = (layer(x, z, positions + s, *rest).sin().sum() for s in (step, -step))
        assert slope[atom, axis].item() == pytest.approx(float(up - down) / 2e-5, rel=1e-6)


def test_gradients_of_forces_by_weights_are_finite_differences():
    layer, (x, z), (positions, *rest) = make("vectors"), draw(6), batch((6,))

    def force_size():
        leaf = positions.clone().requires_grad_()
        out = layer(x, z, leaf, *rest).sin().sum()
        (slope,) = torch.autograd.grad(out, leaf, create_graph=True)
        return slope.square().sum()

    names = dict(layer.named_parameters())
    found = torch.autograd.grad(force_size(), list(names.values()), allow_unused=True)
    for (name, parameter), gradient in zip(names.items(), found, strict=True):
        place = tuple(0 for _ in parameter.shape)
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                parameter[place] += sign * 1e-5
                with torch.enable_grad():
                    values.append(force_size().item())
                parameter[place] -= sign * 1e-5
        numeric = (values[0] - values[1]) / 2e-5
        exact = 0.0 if gradient is None else gradient[place].item()
        assert exact == pytest.approx(numeric, rel=1e-5, abs=1e-5), name


@every_kind
def test_pairs_beyond_the_cutoff_have_no_weight(kind):
    layer, (x, z), system = make(kind), draw(), batch(SIZES)
    near, far = (layer.geometry(z, *system, cutoff=c) for c in (CUTOFF, CUTOFF + 1.5))
    beyond = far.distances >= CUTOFF
    assert beyond.sum() > 20
    assert not far.basis[beyond].any()
    if far.directed is not None:
        assert not far.directed[beyond.repeat(3)].any()
    outs = [layer.filter(x, geometry) for geometry in (near, far)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-13)


@every_kind
def test_nothing_jumps_at_the_cutoff(kind):
    """Value, slope and curvature of two atoms go to 0 there, as (cutoff − r)³ does."""
    layer, (x, z) = make(kind), draw(2)
    open_space = torch.zeros(1, 3, 3, dtype=F64), torch.zeros(1, 3, dtype=torch.bool)

    def features(r):
        positions = torch.zeros(2, 3, dtype=F64)
        positions[1] = torch.as_tensor(r, dtype=F64) * torch.tensor([0.6, 0.0, 0.8], dtype=F64)
        nothing = torch.zeros(2, layer.filter.num_filters + 2 * layer.filter.vectors, dtype=F64)
        written_out = layer.filter.out(torch.cat([nothing, x], -1))
        alone = layer(x, z, 9 * positions, *open_space, torch.tensor([0, 2]))
        torch.testing.assert_close(alone, written_out, rtol=0, atol=1e-13)
        return layer(x, z, positions, *open_space, torch.tensor([0, 2])) - alone

    with torch.no_grad():
        assert not features(CUTOFF).any()
        assert not features(CUTOFF + 1e-9).any()
        sizes = [features(CUTOFF - d).abs().max().item() for d in (0.2, 0.1, 0.05)]
        assert all(size > 0 for size in sizes)
        for larger, smaller in itertools.pairwise(sizes):
            assert 6 < larger / smaller < 11  # 2³ = 8


CHANGES = ["rotation", "mirror", "translation", "lattice shifts", "basis", "order"]


def changed(change, positions, cell, order):
    if change in ("rotation", "mirror"):
        q = rotation() * (-1 if change == "mirror" else 1)
        return positions @ q.T, cell @ q.T
    if change == "translation":
        return positions + torch.tensor([3.3, -20.0, 7.7], dtype=F64), cell
    if change == "lattice shifts":
        steps = torch.randint(-5, 6, (len(positions), 3, 1), generator=seeded())
        return positions + (steps * cell[0]).sum(1), cell
    if change == "basis":
        return positions, torch.tensor([[1.0, 1, 0], [0, 1, 0], [2, 0, 1]], dtype=F64) @ cell
    return positions[order], cell


@pytest.mark.parametrize("change", CHANGES)
@every_kind
def test_the_description_of_a_system_does_not_matter(change, kind):
    positions, cell, pbc, ptr = batch((6,))
    layer, (x, z) = make(kind), draw(6)
    order = torch.tensor([3, 5, 0, 1, 4, 2]) if change == "order" else torch.arange(6)
    after = changed(change, positions, cell, order)
    out = layer(x, z, positions, cell, pbc, ptr)
    other = layer(x[order], z[order], *after, pbc, ptr)
    torch.testing.assert_close(other, out[order], rtol=0, atol=1e-11)


@every_kind
def test_invariants_are_of_vectors_that_turn(kind):
    """What tells atoms apart by angles: two atoms in line or at a right angle, equally far."""
    layer, (x, z) = make(kind), draw(3)
    x[2], z[2] = x[1], z[1]
    open_space = torch.zeros(1, 3, 3, dtype=F64), torch.zeros(1, 3, dtype=torch.bool)
    outs = []
    for other in ([-1.8, 0, 0], [0, 1.8, 0]):
        positions = torch.tensor([[0, 0, 0], [1.8, 0, 0], other], dtype=F64)
        outs.append(layer(x, z, positions, *open_space, torch.tensor([0, 3]))[0])
    tells = (outs[0] - outs[1]).abs().max() > 1e-3
    assert tells == ("vectors" in KINDS[kind])


@pytest.mark.parametrize("times", [(2, 1, 1), (2, 3, 2)])
@every_kind
def test_a_supercell_has_the_same_features(kind, times):
    positions, cell, pbc, ptr = batch((5,))
    layer, (x, z) = make(kind), draw(5)
    out = layer(x, z, positions, cell, pbc, ptr)
    more, larger, more_ptr = supercell(positions, cell, times)
    copies = len(more) // 5
    again = layer(x.repeat(copies, 1), z.repeat(copies), more, larger, pbc, more_ptr)
    torch.testing.assert_close(again, out.repeat(copies, 1), rtol=0, atol=1e-11)


@every_kind
def test_a_system_alone_and_in_a_batch(kind):
    positions, cell, pbc, ptr = batch(SIZES)
    layer, (x, z) = make(kind), draw()
    out = layer(x, z, positions, cell, pbc, ptr)
    for b in range(len(SIZES)):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        one = torch.tensor([0, rows.stop - rows.start])
        alone = layer(x[rows], z[rows], positions[rows], cell[b : b + 1], pbc[b : b + 1], one)
        torch.testing.assert_close(alone, out[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 3])
@every_kind
def test_no_pairs(kind, rows):
    """No atoms, or atoms without neighbours: an empty sum goes through the net that follows."""
    layer, (x, z) = make(kind), draw(rows)
    x.requires_grad_()
    positions = (100 * torch.eye(3, dtype=F64)[:rows]).requires_grad_()
    cell, pbc = torch.zeros(1, 3, 3, dtype=F64), torch.zeros(1, 3, dtype=torch.bool)
    out = layer(x, z, positions, cell, pbc, torch.tensor([0, rows]))
    assert out.shape == (rows, C)
    nothing = torch.zeros(rows, layer.filter.num_filters + 2 * layer.filter.vectors, dtype=F64)
    alone = layer.filter.out(torch.cat([nothing, x], -1))
    torch.testing.assert_close(out, alone)
    out.sum().backward()
    assert positions.grad is None or not positions.grad.any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@every_kind
def test_atoms_in_one_place_have_finite_gradients_of_forces(kind):
    positions, cell, pbc, ptr = batch((6,))
    positions[1] = positions[0]
    positions[3] = positions[2] + cell[0, 0]
    layer, (x, z) = make(kind), draw(6)
    leaf = positions.requires_grad_()
    out = layer(x, z, leaf, cell, pbc, ptr)
    (slope,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    second = torch.autograd.grad(
        slope.square().sum(), [leaf, *layer.parameters()], allow_unused=True
    )
    assert out.isfinite().all()
    assert slope.isfinite().all()
    assert all(g is None or g.isfinite().all() for g in second)


@every_kind
def test_bf16_autocast(kind):
    """Distances, bases and sums stay float32: only the linear maps around them are rounded."""
    layer, (x, z), system = make(kind, torch.float32), draw(dtype=torch.float32), batch(SIZES)
    positions, cell, *rest = system
    given = x, z, positions.float(), cell.float(), *rest
    out = layer(*given)
    with torch.autocast("cpu", torch.bfloat16):
        geometry = layer.geometry(*given[1:])
        assert geometry.basis.dtype == geometry.distances.dtype == torch.float32
        half = layer.filter(x, geometry)
        assert half.dtype == torch.bfloat16
        if layer.filter.vectors:
            assert all(v.dtype == torch.float32 for v in layer.filter.invariants(x, geometry))
        # Squares of vectors may be large; positions alone must not cost any digits.
        exact = layer.geometry(*given[1:])
    torch.testing.assert_close(exact.basis, layer.geometry(*given[1:]).basis, rtol=0, atol=0)
    assert (half.float() - out).abs().max() < 0.03 * out.abs().max()
    half.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_positions_in_half_precision_and_in_float64():
    layer, (x, z), (positions, cell, *rest) = make(dtype=torch.float32), draw(), batch(SIZES)
    geometry = layer.geometry(z, positions, cell, *rest)
    assert geometry.basis.dtype == F64  # as the vectors
    expected = layer.double()(x, z, positions, cell, *rest)
    out = layer.float().filter(x.float(), geometry)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


def test_a_geometry_serves_several_filters():
    layer, (x, z), system = make("vectors"), draw(), batch(SIZES)
    geometry = layer.geometry(z, *system)
    with_fewer = LocalFilter(C, T, 1, T_VECTORS, seeded(9)).double()
    without = LocalFilter(C, T, generator=seeded(9)).double()
    outs = [f(x, geometry) for f in (layer.filter, with_fewer, without)]
    assert len({tuple(out[0].tolist()) for out in outs}) == 3


@every_kind
def test_nothing_of_size_pairs_times_channels_is_kept(kind):
    layer = Layer(**{**KINDS[kind], **({"vectors": 24} if "vectors" in KINDS[kind] else {})})
    wide = LocalFilter(64, T, layer.filter.vectors, T_VECTORS, seeded(4))
    positions, cell, pbc, ptr = batch((24,))
    z = torch.full((24,), 29)
    geometry = layer.geometry(z, positions.float(), cell.float(), pbc, ptr)
    x = torch.randn(24, 64, generator=seeded(), requires_grad=True)
    count = len(geometry.distances)
    assert count > 600
    kept = kept_sizes(lambda: wide(x, geometry))
    largest = max(T, 3 * T_VECTORS) if layer.filter.vectors else T
    assert max(kept) <= largest * count < 64 * count


@pytest.mark.parametrize("kind", ["sums", "vectors, types"])
def test_it_compiles_without_graph_breaks(kind):
    layer, (x, z), system = make(kind, torch.float32), draw(dtype=torch.float32), batch(SIZES)
    positions, cell, pbc, ptr = system
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    vectors = pairs.vectors(positions, cell, ptr).float()

    def run(vectors, x):
        return layer.filter(x, layer.basis(pairs, vectors, len(z), z))

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = run(vectors, x)
    torch.testing.assert_close(compiled(vectors, x), expected, rtol=0, atol=1e-5)


def test_weights_come_from_the_generator():
    state = torch.get_rng_state()
    first, second = (
        [
            *LocalBasis(5.0, 4, 3, True, seeded(1)).parameters(),
            *LocalFilter(4, 4, 2, 3, seeded(1)).parameters(),
        ]
        for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first) == 4 + 9
    mixes = [LocalFilter(4, 4, 2, 3, seeded(seed)).vector_mix.weight for seed in (1, 2)]
    assert not torch.equal(*mixes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LocalFilter(4, 4)
        assert not torch.equal(torch.get_rng_state(), state)


def test_copies_and_saved_states():
    layer, (x, z), system = make("vectors, types"), draw(), batch(SIZES)
    again = make("vectors, types")
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)
    again.load_state_dict(layer.state_dict())
    for other in (again, copy.deepcopy(layer)):
        assert torch.equal(other(x, z, *system), layer(x, z, *system))
    assert "6, num_filters=4, vectors=3" in repr(layer.filter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 0}, "channels is 0"),
        ({"num_basis": 0}, "num_basis is 0"),
        ({"num_filters": 0}, "num_filters is 0"),
        ({"vectors": -1}, "-1 vector channels"),
        ({"vectors": 2, "vector_basis": 0}, "2 vector channels need vector_basis ≥ 1, got 0"),
    ],
)
def test_sizes_that_make_no_filter(settings, message):
    with pytest.raises(ValueError, match=message):
        LocalFilter(**{"channels": C, **settings})


@pytest.mark.parametrize("settings", [{"cutoff": 0.0}, {"num_basis": 1}, {"vector_basis": 1}])
def test_settings_that_make_no_basis(settings):
    with pytest.raises(ValueError, match="need 0 < cutoff < ∞ and num_basis ≥ 2"):
        LocalBasis(**settings)


def test_refusals():
    layer, (x, z), (positions, cell, pbc, ptr) = make("vectors, types"), draw(), batch(SIZES)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    vectors = pairs.vectors(positions, cell, ptr)
    geometry = layer.basis(pairs, vectors, 12, z)
    with pytest.raises(ValueError, match="needs atomic_numbers"):
        layer.basis(pairs, vectors, 12)
    with pytest.raises(ValueError, match=r"vectors have shape .* expected \(\d+, 3\)"):
        layer.basis(pairs, geometry.distances, 12, z)
    with pytest.raises(ValueError, match="atomic_numbers have shape"):
        layer.basis(pairs, vectors, 13, z)
    with pytest.raises(ValueError, match="atomic_numbers run from 0"):
        layer.basis(pairs, vectors, 12, z * 0)
    with pytest.raises(ValueError, match=r"x has shape \(12, 5\), expected \(N, 6\)"):
        layer.filter(x[:, :5], geometry)
    with pytest.raises(ValueError, match="pairs name atoms from 0 to 11, but x has 11 rows"):
        layer.filter(x[:11], geometry)
    with pytest.raises(ValueError, match="this geometry has no vectors"):
        layer.filter(x, make("sums").geometry(z, positions, cell, pbc, ptr))


@pytest.mark.parametrize("rows", [0, 2])
def test_pairs_with_self(rows):
    """Each atom sees itself once, before its own images, and the order stays."""
    none = torch.zeros(0, dtype=torch.int64)
    empty = NeighborPairs(none, none, torch.zeros(0, 3, dtype=torch.int64))
    assert empty.with_self(rows).index_i.tolist() == list(range(rows))
    positions, cell, pbc, ptr = batch((3, 0, 1, 4))
    without = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    expected = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    found = without.with_self(8)
    assert found.index_i.tolist() == expected.index_i.tolist()
    assert found.index_j.tolist() == expected.index_j.tolist()
    assert (found.index_i.diff() >= 0).all()
    assert int(found.is_self().sum()) == 8
    for pair in (found.without_self(), without):
        assert torch.equal(pair.shift, without.shift)
    groups, truth = found.groups(), expected.groups()
    assert torch.equal(groups.index_j, truth.index_j)


def test_dropout_takes_invariants_of_vectors_and_nothing_else():
    layer, given = Layer(vectors=64, vector_dropout=0.7).double(), (*draw(), *batch(SIZES))
    invariants = slice(C, C + 2 * 64)
    whole = inputs(layer.eval(), *given)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        part = inputs(layer.train(), *given)
    kept = part[:, invariants] != 0
    wanted = torch.where(kept, whole[:, invariants] / 0.3, 0.0)
    torch.testing.assert_close(part[:, invariants], wanted)
    assert kept.double().mean() == pytest.approx(0.3, abs=0.05)  # 12·128 draws: 4 sigma
    assert torch.equal(part[:, :C], whole[:, :C])
    assert torch.equal(part[:, invariants.stop :], whole[:, invariants.stop :])


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_dropout_that_is_no_probability(probability):
    with pytest.raises(ValueError, match=r"vector_dropout is .*, expected 0 ≤ p < 1"):
        LocalFilter(C, T, D, T_VECTORS, vector_dropout=probability)


def test_hooks_and_replacements_of_the_mixing_map_take_effect():
    layer, given = make(), (*draw(), *batch(SIZES))
    before = inputs(layer, *given)

    def doubled(_module, _args, out):
        return 2 * out

    handle = layer.filter.vector_mix.register_forward_hook(doubled)
    hooked = inputs(layer, *given)
    handle.remove()
    layer.filter.vector_mix = torch.nn.Sequential(layer.filter.vector_mix)
    layer.filter.vector_mix.register_forward_hook(doubled)
    replaced = inputs(layer, *given)
    assert not torch.equal(hooked, before)
    torch.testing.assert_close(replaced, hooked, rtol=0, atol=0)
