import itertools

import pytest
import torch
from periodic import F64, batch, kept_sizes, lengths, over_images, rotation, seeded, supercell

from flt_mol.functional import _rows
from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.nn.embedding import AtomEmbedding
from flt_mol.nn.heads import READOUTS, DisplacementHead, EnergyHead
from flt_mol.nn.local import LocalBasis

C, T, CUTOFF = 8, 6, 4.2
SIZES = (5, 0, 1, 6)
PTR = torch.tensor([0, *itertools.accumulate(SIZES)])


def draw(rows=12, dtype=F64, seed=1):
    generator = seeded(seed)
    x = torch.randn(rows, C, generator=generator, dtype=F64).to(dtype).requires_grad_()
    return x, torch.randint(3, (rows,), generator=generator)


def perturbed(head):
    """Norms and tags that are not at their start, where errors might not show."""
    with torch.no_grad():
        for k, parameter in enumerate(head.parameters()):
            noise = torch.randn(parameter.shape, generator=seeded(k), dtype=F64)
            parameter += 0.2 * noise.to(parameter.dtype)
    return head


# Energies


def make_energy(readout="tags", dtype=F64, **settings):
    head = EnergyHead(C, readout=readout, generator=seeded(5), **settings).to(dtype)
    return perturbed(head)


@pytest.mark.parametrize("watched", [False, True])
def test_energies_a_chunk_of_atoms_at_a_time(monkeypatch, watched):
    head, (x, tags) = make_energy(num_outputs=2), draw()
    expected = head(x, tags, PTR).detach()
    lengths_seen = []
    if watched:  # who watches a layer sees all atoms
        head.atom_energy[1].register_forward_hook(lambda *given: lengths_seen.append(len(given[2])))
    monkeypatch.setattr(_rows, "NUMBERS", 5 * C)
    with torch.no_grad():
        torch.testing.assert_close(head(x, tags, PTR), expected)
    assert lengths_seen == [12] * watched


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tags, ptr: (tags[:, None], ptr), r"tags have shape \(12, 1\), expected \(12,\)"),
        (lambda tags, ptr: (tags[:1], ptr), r"tags have shape \(1,\), expected \(12,\)"),
        (lambda tags, ptr: (tags - 1, ptr), "tags are not all 0 .below"),
        (lambda tags, ptr: (tags + 1, ptr), "tags are not all 0 .below"),
        (lambda tags, ptr: (tags, ptr[:2]), "number of rows, 12; .* ends at 5 "),
    ],
)
def test_tags_and_offsets_that_are_not_of_these_atoms(change, message):
    x, tags = draw()
    assert {0, 2} <= set(tags.tolist())
    with pytest.raises(ValueError, match=message):
        make_energy()(x, *change(tags, PTR))


def test_embeddings_want_a_tag_for_each_atom():
    numbers = torch.tensor([8, 1])
    for wrong in (torch.tensor([2]), torch.tensor([[2], [2]])):
        with pytest.raises(ValueError, match=r"expected \(N,\) both"):
            AtomEmbedding(C)(numbers, wrong)
    with pytest.raises(ValueError, match=r"expected \(N,\) both"):
        AtomEmbedding(C)(numbers[:, None], torch.tensor([[2], [2]]))


def test_embeddings_a_chunk_of_atoms_at_a_time(monkeypatch):
    embedding, numbers = AtomEmbedding(C), torch.arange(1, 13)
    expected = embedding(numbers, numbers % 3).detach()
    monkeypatch.setattr(_rows, "NUMBERS", 5 * C)
    with torch.no_grad():
        torch.testing.assert_close(embedding(numbers, numbers % 3), expected, rtol=0, atol=0)
        numbers[9] = 119
        with pytest.raises(ValueError, match="atom 9 .* has atomic number 119"):
            embedding(numbers, numbers % 3)


def energies_by_atom(head, x, tags):
    """A loop over systems and atoms, with LayerNorm, GELU and the weights written out."""
    first, last = head.atom_energy[1], head.atom_energy[3]
    out = []
    for b in range(len(SIZES)):
        terms = []
        for n in range(int(PTR[b]), int(PTR[b + 1])):
            h = x[n]
            if isinstance(norm := head.atom_energy[0], torch.nn.LayerNorm):
                h = (h - h.mean()) / (h.var(correction=0) + 1e-5).sqrt()
                h = h * norm.weight + norm.bias
            h = first.weight @ h + first.bias
            h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
            e = last.weight @ h + last.bias
            terms.append(head.tag_weight[tags[n]] * e if head.readout == "tags" else e)
        total = sum(terms, torch.zeros(head.num_outputs, dtype=x.dtype))
        out.append(total / max(1, len(terms)) if head.readout == "mean" else total)
    out = torch.stack(out)
    return out.squeeze(-1) if head.num_outputs == 1 else out


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("norm", [True, False])
def test_energies_and_gradients_are_those_of_the_formula(readout, num_outputs, norm):
    head, (x, tags) = make_energy(readout, num_outputs=num_outputs, norm=norm), draw()
    out, expected = head(x, tags, PTR), energies_by_atom(head, x, tags)
    assert out.shape == ((4,) if num_outputs == 1 else (4, num_outputs))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert not out[1].any()  # no atoms
    assert (out[[0, 2, 3]] != 0).all()
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64)
    inputs = [x, *head.parameters()]
    pairs = zip(*(torch.autograd.grad(y, inputs, seed) for y in (out, expected)), strict=True)
    for gradient, truth in pairs:
        torch.testing.assert_close(gradient, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("readout", "factor"), [("tags", 2.0), ("sum", 2.0), ("mean", 1.0)])
def test_what_grows_with_the_system_and_what_does_not(readout, factor):
    head, (x, tags) = make_energy(readout, num_outputs=2), draw()
    once = head(x, tags, PTR)
    rows = [slice(int(a), int(b)) for a, b in itertools.pairwise(PTR)]
    order = torch.cat([torch.arange(12)[r].repeat(2) for r in rows])
    twice = x[order], tags[order]
    torch.testing.assert_close(head(*twice, 2 * PTR), factor * once, rtol=0, atol=1e-12)


def test_weights_of_tags_begin_as_documented_and_are_there_for_that_readout_only():
    assert EnergyHead(C).tag_weight.tolist() == pytest.approx([0.1, 0.3, 1.0])
    assert EnergyHead(C, num_outputs=2).tag_weight.tolist() == [
        pytest.approx([w, w]) for w in (0.1, 0.3, 1.0)
    ]
    layers = {f"atom_energy.{k}.{name}" for k in (0, 1, 3) for name in ("weight", "bias")}
    assert set(EnergyHead(C).state_dict()) == {"tag_weight", *layers}
    for readout in ("sum", "mean"):
        assert set(EnergyHead(C, readout=readout).state_dict()) == layers
    bare = {name for name in layers if ".0." not in name}
    assert set(EnergyHead(C, readout="sum", norm=False).state_dict()) == bare


def test_energies_begin_as_torchs_own_layers_do():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EnergyHead(C)
        torch.manual_seed(0)
        first, last = torch.nn.Linear(C, C), torch.nn.Linear(C, 1)
    for layer, truth in ((head.atom_energy[1], first), (head.atom_energy[3], last)):
        assert torch.equal(layer.weight, truth.weight)
        assert torch.equal(layer.bias, truth.bias)


@pytest.mark.parametrize("readout", READOUTS)
def test_energies_are_in_float32_under_autocast(readout):
    head, (x, tags) = make_energy(readout, torch.float32), draw(dtype=torch.float32)
    truth = head(x, tags, PTR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = head(x, tags, PTR)
        rounded = head(x.bfloat16(), tags, PTR)
    assert torch.equal(out, truth)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, truth, rtol=0.05, atol=0.05)
    halved = head.to(torch.bfloat16)(x.bfloat16(), tags, PTR)
    assert halved.dtype == torch.float32
    torch.testing.assert_close(halved, truth, rtol=0.1, atol=0.1)


def test_energies_of_what_does_not_fit_are_refused():
    with pytest.raises(ValueError, match="'max'; known: tags, sum, mean"):
        EnergyHead(C, readout="max")
    with pytest.raises(ValueError, match="num_outputs is 0"):
        EnergyHead(C, num_outputs=0)
    with pytest.raises(ValueError, match="needs the tags"):
        EnergyHead(C)(torch.zeros(2, C), None, torch.tensor([0, 2]))


# Displacements


def make(dtype=F64, channels=3):
    """A head whose numbers are of order one."""
    head = DisplacementHead(C, T, channels, generator=seeded(3)).to(dtype)
    with torch.no_grad():
        head.strength[2].weight /= head.INITIAL_SCALE
    return perturbed(head)


def system_of(sizes=SIZES, dtype=F64):
    positions, cell, pbc, ptr = batch(sizes)
    return positions.to(dtype).requires_grad_(), cell.to(dtype).requires_grad_(), pbc, ptr


def geometry(positions, cell, pbc, ptr, self_pairs=False):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=self_pairs)
    basis = LocalBasis(CUTOFF, T, generator=seeded())
    return basis(pairs, pairs.vectors(positions, cell, ptr), positions.shape[0])


def displaced(head, x, system, fixed=None, **settings):
    return head(x, geometry(*system, **settings), fixed)


def by_images(head, x, positions, cell, pbc, ptr):
    """A loop over T, with F_c (n, n, C') and unit vectors (n, n, 3) of all pairs written out."""
    h = torch.nn.functional.layer_norm(x, (C,), head.norm.weight, head.norm.bias)
    strength, value = head.strength(h), head.value(h)
    out = torch.zeros_like(positions)
    spacing = CUTOFF / (T - 1)
    centres = spacing * torch.arange(T, dtype=x.dtype)
    for rows, _, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)[..., None]
        u = (r / CUTOFF).clamp(max=1.0)
        window = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
        basis = window * (-((r - centres) ** 2) / (2 * spacing**2)).exp()
        m = torch.einsum("ic,ijc,jc->ij", strength[rows], basis @ head.weight, value[rows])
        unit = torch.where(r == 0, 0.0, vectors / torch.where(r == 0, 1.0, r))
        unit = unit * r**2 / (r**2 + 0.1**2)
        index = torch.arange(rows.start, rows.stop)
        out = out.index_add(0, index, torch.einsum("ij,ija->ia", m, unit))
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize("self_pairs", [False, True])
def test_displacements_and_gradients_are_those_of_the_sum_over_images(dtype, tolerance, self_pairs):
    head, system, (x, _) = make(dtype), system_of(dtype=dtype), draw(dtype=dtype)
    out = displaced(head, x, system, self_pairs=self_pairs)
    expected = by_images(head, x, *system)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    assert (out[:5].norm(dim=-1) > 0.01).all()
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64).to(dtype)
    inputs = [x, *system[:2], *head.parameters()]
    pairs = zip(*(torch.autograd.grad(y, inputs, seed) for y in (out, expected)), strict=True)
    for gradient, truth in pairs:
        assert (gradient != 0).any()
        torch.testing.assert_close(gradient, truth, rtol=tolerance, atol=20 * tolerance)


def test_gradients_of_gradients():
    head, (x, _) = make(), draw(4)
    positions, cell, pbc, ptr = system_of((3, 1))
    names = [name for name, _ in head.named_parameters()]

    def outputs(x, positions, *weights):
        given = dict(zip(names, weights, strict=True))
        local = geometry(positions, cell, pbc, ptr)
        return torch.func.functional_call(head, given, (x, local))

    inputs = x, positions, *(weight.detach().requires_grad_() for weight in head.parameters())
    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, inputs, fast_mode=True)


@pytest.mark.parametrize("mirror", [False, True])
def test_displacements_turn_and_mirror_with_the_system(mirror):
    head, (x, _) = make(), draw()
    positions, cell, pbc, ptr = system_of()
    turn = -rotation(4) if mirror else rotation(4)
    assert float(torch.linalg.det(turn)) == pytest.approx(-1.0 if mirror else 1.0)
    out = displaced(head, x, (positions, cell, pbc, ptr))
    turned = displaced(head, x, (positions @ turn, cell @ turn, pbc, ptr))
    torch.testing.assert_close(turned, out @ turn, rtol=0, atol=1e-10)
    assert (turned - out).abs().max() > 0.1


def test_displacements_of_a_flat_molecule_stay_in_its_plane():
    head, (x, _) = make(), draw(5)
    positions = torch.randn(5, 3, generator=seeded(), dtype=F64) * torch.tensor([1.5, 1.5, 0.0])
    no_cell = torch.zeros(1, 3, 3, dtype=F64), torch.zeros(1, 3, dtype=torch.bool)
    out = displaced(head, x, (positions, *no_cell, torch.tensor([0, 5])))
    assert not out[:, 2].any()
    assert (out[:, :2].abs() > 1e-4).any(1).all()


def test_where_a_system_lies_which_images_and_which_order_do_not_matter():
    head, (x, _) = make(), draw()
    positions, cell, pbc, ptr = system_of()
    truth = displaced(head, x, (positions, cell, pbc, ptr))
    out = displaced(head, x, (positions + torch.tensor([3.0, -70.0, 0.4]), cell, pbc, ptr))
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-9)
    system = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    turns = torch.randint(-2, 3, (12, 3), generator=seeded()) * pbc[system]
    shifted = positions + (turns[:, :, None] * cell[system]).sum(1)
    out = displaced(head, x, (shifted, cell, pbc, ptr))
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-9)
    order = torch.cat([torch.arange(5).flip(0), torch.arange(5, 6), torch.arange(6, 12).roll(2)])
    out = displaced(head, x[order], (positions[order], cell, pbc, ptr))
    torch.testing.assert_close(out, truth[order], rtol=0, atol=1e-10)


def test_batch_is_alone():
    head, (x, _) = make(torch.float32), draw(dtype=torch.float32)
    positions, cell, pbc, ptr = system_of(dtype=torch.float32)
    together = displaced(head, x, (positions, cell, pbc, ptr))
    for b in range(4):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        one = positions[rows], cell[b : b + 1], pbc[b : b + 1], torch.tensor([0, SIZES[b]])
        alone = displaced(head, x[rows], one)
        torch.testing.assert_close(alone, together[rows], rtol=0, atol=1e-5)


def test_supercells_are_consistent():
    head, (x, _) = make(), draw(5)
    positions, cell, pbc, ptr = batch((5,))
    truth = displaced(head, x, (positions, cell, pbc, ptr))
    tiled, scaled, longer = supercell(positions, cell, (2, 1, 2))
    out = displaced(head, x.repeat(4, 1), (tiled, scaled, pbc, longer))
    torch.testing.assert_close(out, truth.repeat(4, 1), rtol=0, atol=1e-10)


def test_fixed_atoms_do_not_move_at_all():
    head, system, (x, _) = make(), system_of(), draw()
    fixed = torch.rand(12, generator=seeded()) < 0.5
    free, out = displaced(head, x, system), displaced(head, x, system, fixed)
    assert torch.equal(out[fixed], torch.zeros_like(out[fixed]))
    assert torch.equal(out[~fixed], free[~fixed])
    (gradient,) = torch.autograd.grad(out[fixed].sum(), x, allow_unused=True)
    assert not gradient.any()
    assert not displaced(head, x, system, torch.ones(12, dtype=torch.bool)).any()


def pair_apart(head, x, distance):
    positions = torch.zeros(2, 3, dtype=F64)
    positions[1] = distance * torch.tensor([2.0, -1, 2], dtype=F64) / 3
    no_cell = torch.zeros(1, 3, 3, dtype=F64), torch.zeros(1, 3, dtype=torch.bool)
    positions.requires_grad_()
    return displaced(head, x, (positions, *no_cell, torch.tensor([0, 2]))), positions


def test_nothing_jumps_at_the_cutoff_nor_where_atoms_coincide():
    head, (x, _) = make(), draw(2)
    inside, _ = pair_apart(head, x, CUTOFF - 1e-3)
    outside, _ = pair_apart(head, x, CUTOFF + 1e-3)
    assert 0 < inside.abs().max() < 1e-7
    assert not outside.any()
    assert pair_apart(head, x, 1.0)[0].abs().max() > 0.05
    for distance in (1e-3, -1e-3, 1e-8, 1e-30, 0.0):
        out, positions = pair_apart(head, x, distance)
        assert out.abs().max() <= 300 * distance**2 + 1e-12
        # The slope at zero is zero from both sides.
        (gradient,) = torch.autograd.grad(out[0, 0], positions)
        assert gradient.isfinite().all()
        assert gradient.abs().max() <= 1000 * abs(distance) + 1e-12


def test_first_displacements_are_small_but_not_zero():
    """An fcc slab's top, jittered, with forty neighbours per atom."""
    steps = torch.tensor(list(itertools.product(range(4), range(4), range(3))), dtype=F64)
    primitive = torch.tensor([[2.55, 0, 0], [1.275, 2.208, 0], [1.275, 0.736, 2.08]], dtype=F64)
    positions = steps @ primitive + 0.1 * torch.randn(48, 3, generator=seeded(), dtype=F64)
    cell = torch.tensor([4.0, 4.0, 1.0], dtype=F64)[:, None] * primitive
    pairs = neighbor_pairs(
        positions, cell[None], torch.tensor([[True, True, False]]), torch.tensor([0, 48]), 5.0
    )
    assert len(pairs.index_i) > 30 * 48
    vectors = pairs.vectors(positions, cell[None], torch.tensor([0, 48]))
    local = LocalBasis(5.0, 32, generator=seeded())(pairs, vectors.float(), 48)
    sizes = []
    for seed in range(5):
        head = DisplacementHead(64, 32, generator=seeded(seed))
        for scale in (0.1, 10.0):  # of features: the norm takes it off
            x = scale * torch.randn(48, 64, generator=seeded(seed + 10))
            sizes.append(head(x, local).norm(dim=-1).mean())
    assert min(sizes) > 0.005
    assert max(sizes) < 0.1
    assert 0.01 < sum(sizes) / len(sizes) < 0.05


def test_displacements_are_in_float32_under_autocast():
    head, (x, _) = make(torch.float32), draw(dtype=torch.float32)
    system = system_of(dtype=torch.float32)
    truth = displaced(head, x, system)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = displaced(head, x, system)
        rounded = displaced(head, x.bfloat16(), system)
    assert torch.equal(out, truth)
    assert rounded.dtype == torch.float32
    (gradient,) = torch.autograd.grad(rounded.sum(), x)
    assert gradient.isfinite().all()
    torch.testing.assert_close(rounded, truth, rtol=0.05, atol=0.1)
    halved = head.to(torch.bfloat16)(x.bfloat16(), geometry(*system))
    assert halved.dtype == torch.float32
    torch.testing.assert_close(halved, truth, rtol=0.1, atol=0.3)


def test_nothing_of_the_size_pairs_times_channels_is_kept():
    channels = 200
    head, (x, _) = make(channels=channels), draw(12)
    local = geometry(*batch((12,)))
    count = len(local.distances)
    assert count > 200
    assert max(kept_sizes(lambda: head(x, local))) < count * channels / 10


@pytest.mark.parametrize("kind", ["energy", "displacement"])
def test_weights_follow_the_generator_and_come_back_from_a_file(kind, tmp_path):
    def build(seed):
        generator = seeded(seed)
        if kind == "energy":
            return EnergyHead(C, num_outputs=2, generator=generator)
        return DisplacementHead(C, T, generator=generator)

    state = torch.get_rng_state()
    first, same, other = build(1), build(1), build(2)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [dict(head.named_parameters()) for head in (first, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    torch.save(first.state_dict(), tmp_path / "head.pt")
    other.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    x, tags = draw(dtype=torch.float32)
    rest = (tags, PTR) if kind == "energy" else (geometry(*system_of(dtype=torch.float32)),)
    assert torch.equal(first(x, *rest), other(x, *rest))


def test_displacements_of_what_does_not_fit_are_refused():
    head, (x, _), local = make(), draw(), geometry(*system_of())
    for size in ("embed_dim", "num_basis", "channels"):
        with pytest.raises(ValueError, match=f"{size} is 0"):
            DisplacementHead(**{"embed_dim": C, "num_basis": T, "channels": 2, size: 0})
    with pytest.raises(ValueError, match="x has 3 rows"):
        head(x[:3], local)
    with pytest.raises(ValueError, match=r"expected \(N, 8\)"):
        head(x[:, :4], local)
    with pytest.raises(ValueError, match="basis has 5 functions, expected 6"):
        head(x, local._replace(basis=local.basis[:, :5]))
    for fixed in (torch.zeros(12), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="fixed has shape"):
            head(x, local, fixed)
