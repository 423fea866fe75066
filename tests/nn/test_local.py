import copy

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

from flt_mol.functional import linear
from flt_mol.functional.images import image_attention
from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.functional.pairs import pair_sums
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.local import ImageKeys, PairCorrection, PairFilter
from flt_mol.nn.radial import PairTypes
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum

C, H, T, CUTOFF = 6, 2, 8, 4.2
SIZES = (5, 0, 1, 6)
FILTERS = {
    "linear": {},
    "types": {"pair_types": True},
    "hidden": {"hidden_dim": 5},
    "hidden, types": {"hidden_dim": 5, "pair_types": True},
}


def make_filter(name="linear", dtype=F64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PairFilter(C, CUTOFF, T, **FILTERS[name], generator=seeded(3)).to(dtype)


def make_correction(dtype=F64, scale=1.0, **settings):
    layer = PairCorrection(H, CUTOFF, T, generator=seeded(3), **settings).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(scale)
    return layer


def draw(rows, dtype=F64, seed=1):
    generator = seeded(seed)
    x = torch.randn(rows, C, generator=generator, dtype=F64).to(dtype).requires_grad_()
    return x, torch.randint(1, 119, (rows,), generator=generator)


def system_of(sizes=SIZES, dtype=F64):
    positions, cell, pbc, ptr = batch(sizes)
    return positions.to(dtype).requires_grad_(), cell.to(dtype).requires_grad_(), pbc, ptr


def filtered(layer, x, z, positions, cell, pbc, ptr):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    return layer(x, pairs, pairs.vectors(positions, cell, ptr), z)


def window(r):
    u = (r / CUTOFF).clamp(max=1.0)
    return 1 - 10 * u**3 + 15 * u**4 - 6 * u**5


def gaussians(layer, r, z):
    """B_t without the cutoff, (n, n, T), as the layer's docstring has it."""
    types = layer.basis.pair_types
    if types is not None:
        a = 1 + types.scale_receiver[z] @ types.scale_sender[z].T
        r = a * r + types.shift_receiver[z] @ types.shift_sender[z].T
    spacing = CUTOFF / (T - 1)
    centres = spacing * torch.arange(T, dtype=r.dtype)
    return (-((r[..., None] - centres) ** 2) / (2 * spacing**2)).exp()


def filtered_by_images(layer, x, z, positions, cell, pbc, ptr):
    """A loop over T with the filter of every pair written out, (n, n, C)."""
    value, summed = layer.value(x), torch.zeros_like(x)
    for rows, shift, vectors in over_images(positions, cell, pbc, ptr, CUTOFF):
        r = lengths(vectors)
        basis = gaussians(layer, r, z[rows])
        if layer.hidden is not None:
            basis = torch.nn.functional.silu(layer.hidden(basis))
        filters = (basis @ layer.weight) * window(r)[..., None]
        if not shift.any():
            filters = filters * (1 - torch.eye(len(r)))[..., None]
        index = torch.arange(rows.start, rows.stop)
        summed = summed.index_add(0, index, torch.einsum("ijc,jc->ic", filters, value[rows]))
    return layer.out(summed)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-4)])
def test_filter_and_its_gradients_are_those_of_the_sum_over_images(name, dtype, tolerance):
    layer, system, (x, z) = make_filter(name, dtype), system_of(dtype=dtype), draw(12, dtype)
    out, expected = (f(layer, x, z, *system) for f in (filtered, filtered_by_images))
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    inputs = [x, *system[:2], *layer.parameters()]
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64).to(dtype)
    gradients = torch.autograd.grad(out, inputs, seed)
    truth = torch.autograd.grad(expected, inputs, seed)
    assert all((gradient != 0).any() for gradient in gradients)
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=tolerance, atol=10 * tolerance)


def test_distances_will_do_instead_of_vectors():
    layer, (positions, cell, pbc, ptr), (x, _) = make_filter(), system_of(), draw(12)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    vectors = pairs.vectors(positions, cell, ptr)
    torch.testing.assert_close(layer(x, pairs, vectors.norm(dim=-1)), layer(x, pairs, vectors))


@pytest.mark.parametrize("name", FILTERS)
def test_pairs_beyond_the_cutoff_have_no_weight(name):
    layer, (positions, cell, pbc, ptr), (x, z) = make_filter(name), system_of(), draw(12)
    near, far = (neighbor_pairs(positions, cell, pbc, ptr, c) for c in (CUTOFF, CUTOFF + 1.5))
    assert len(far.index_i) > len(near.index_i)
    outs = [layer(x, pairs, pairs.vectors(positions, cell, ptr), z) for pairs in (near, far)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-13)


CHANGES = ["rotation", "translation", "lattice shifts", "basis", "order"]


def changed(change, positions, cell, order):
    if change == "rotation":
        return positions @ rotation().T, cell @ rotation().T
    if change == "translation":
        return positions + torch.tensor([3.3, -20.0, 7.7], dtype=F64), cell
    if change == "lattice shifts":
        steps = torch.randint(-5, 6, (len(positions), 3, 1), generator=seeded())
        return positions + (steps * cell[0]).sum(1), cell
    if change == "basis":
        return positions, torch.tensor([[1.0, 1, 0], [0, 1, 0], [2, 0, 1]], dtype=F64) @ cell
    return positions[order], cell


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", ["filter", "images", "correction"])
def test_the_description_of_a_system_does_not_matter(change, part):
    positions, cell, pbc, ptr = batch((6,))
    order = torch.tensor([3, 5, 0, 1, 4, 2]) if change == "order" else torch.arange(6)
    after = changed(change, positions, cell, order)
    out = PARTS[part](positions, cell, pbc, ptr, torch.arange(6))
    again = PARTS[part](*after, pbc, ptr, order)
    torch.testing.assert_close(again, out[order], rtol=0, atol=1e-10)


def filter_part(positions, cell, pbc, ptr, atoms):
    x, z = draw(6)
    return filtered(
        make_filter("types", positions.dtype),
        x[atoms].to(positions.dtype),
        z[atoms],
        *(positions, cell, pbc, ptr),
    )


def images_part(positions, cell, pbc, ptr, atoms):
    layer = ImageKeys(GaussianSpectrum(H, 3, generator=seeded()).to(positions.dtype).mask, CUTOFF)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    keys = layer(pairs, pairs.vectors(positions, cell, ptr), pairs.groups())
    x = draw(6)[0][atoms].view(-1, H, C // H).to(positions.dtype)
    return image_attention(x, x.sin(), x, ptr, *keys).flatten(1)


def correction_part(positions, cell, pbc, ptr, atoms):
    x, z = draw(6)
    x = x[atoms].view(-1, H, C // H).to(positions.dtype)
    return corrected(
        make_correction(positions.dtype, pair_types=True),
        *(x.exp(), x.sin().exp(), x, z[atoms]),
        *(positions, cell, pbc, ptr),
    ).flatten(1)


def corrected(layer, q, k, v, z, positions, cell, pbc, ptr):
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    weights = layer(pairs, pairs.groups(), pairs.vectors(positions, cell, ptr), z)
    sums = linear.linear_sums(q, k, v, ptr)
    i, j, weight = weights
    return linear.normalised(sums + pair_sums(q, k, v, weight, i, j))


PARTS = {"filter": filter_part, "images": images_part, "correction": correction_part}


def deviation_in_a_supercell(part, times, dtype):
    positions, cell, pbc, ptr = batch((6,))
    positions, cell = positions.to(dtype), cell.to(dtype)
    large, large_cell, large_ptr = supercell(positions, cell, times)
    atoms = torch.arange(6)
    out = part(positions, cell, pbc, ptr, atoms)
    tiled = part(large, large_cell, pbc, large_ptr, atoms.repeat(len(large) // 6))
    assert out.abs().max() > 0.1
    return (tiled - out.repeat(len(large) // 6, 1)).abs().max().item()


@pytest.mark.parametrize("part", ["filter", "images"])
@pytest.mark.parametrize("times", [(2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-5)])
def test_atoms_of_a_supercell_have_the_same_output(part, times, dtype, tolerance):
    assert deviation_in_a_supercell(PARTS[part], times, dtype) < tolerance


def test_the_correction_is_not_the_same_in_a_supercell():
    # The global sum counts each atom of the cell once: four times as many in the 2 × 2 × 1 cell,
    # while the images near by stay as many. Documented, and here is how much it is.
    assert deviation_in_a_supercell(correction_part, (2, 2, 1), F64) > 0.01


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-4)])
def test_correction_is_the_kernel_matrix_times_exp_of_the_sum_over_images(types, dtype, tolerance):
    layer, system = make_correction(dtype, 8.0, pair_types=types), system_of(dtype=dtype)
    x, z = draw(12, dtype)
    x = x.view(12, H, C // H)
    q, k, v = x.exp(), x.sin().exp(), x
    out = corrected(layer, q, k, v, z, *system)
    ptr, total = system[3], torch.zeros(12, 12, H, dtype=dtype)
    for rows, shift, vectors in over_images(*system, CUTOFF):
        r = lengths(vectors)
        f = (gaussians(layer, r, z[rows]) @ layer.weight) * window(r)[..., None]
        if not shift.any():
            f = f * (1 - torch.eye(len(r)))[..., None]
        index = torch.arange(rows.start, rows.stop)
        total = total.index_put((index[:, None], index), f, accumulate=True)
    same = torch.block_diag(*[torch.ones(n, n) for n in ptr.diff().tolist()])
    exponent = 5 * torch.tanh(total / 5).permute(2, 0, 1)
    weights = torch.einsum("ihm,jhm->hij", q, k) * exponent.exp() * same
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.einsum("hij,jhv->ihv", weights, v)
    assert exponent.abs().max() > 1
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    inputs = [x, *system[:2], *layer.parameters()]
    seed = torch.randn(out.shape, generator=seeded(), dtype=F64).to(dtype)
    gradients, truth = (
        torch.autograd.grad(y, inputs, seed, retain_graph=True) for y in (out, expected)
    )
    for gradient, true in zip(gradients, truth, strict=True):
        torch.testing.assert_close(gradient, true, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_corrected_weights_stay_positive_and_bounded_in_the_smallest_cells(scale):
    positions, cell = torch.zeros(1, 3, dtype=F64), 2.3 * torch.eye(3, dtype=F64)[None]
    pbc, ptr = torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 1])
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    layer = make_correction()
    with torch.no_grad():
        layer.weight.fill_(scale)
        i, j, weight = layer(pairs, pairs.groups(), pairs.vectors(positions, cell, ptr))
    assert (i.tolist(), j.tolist()) == ([0], [0])
    assert len(pairs.index_i) == 26  # the 3 × 3 × 3 cells around
    total = 1 + weight
    bound = torch.tensor(5.0, dtype=F64)
    assert ((total >= (-bound).exp() - 1e-12) & (total <= bound.exp() + 1e-9)).all()
    one_term_per_image = 1 + 2 * torch.expm1(torch.tensor(-5.0))
    assert one_term_per_image < -0.98


def test_one_image_per_pair_has_the_weight_of_its_own_f():
    positions = torch.tensor([[0.0, 0, 0], [1.5, 0, 0]], dtype=F64)
    cell, pbc, ptr = torch.zeros(1, 3, 3), torch.zeros(1, 3, dtype=torch.bool), torch.tensor([0, 2])
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    layer = make_correction()
    r = torch.tensor([1.5], dtype=F64)
    f = (gaussians(layer, r, None) * window(r)[:, None]) @ layer.weight
    weight = layer(pairs, pairs.groups(), pairs.vectors(positions, cell, ptr)).weight
    torch.testing.assert_close(weight, (5 * (f / 5).tanh()).exp().sub(1).expand(2, H))


def test_image_keys_are_the_mask_and_the_window():
    positions, cell, pbc, ptr = system_of()
    spectrum = GaussianSpectrum(H, 3, generator=seeded()).to(F64)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF + 0.5, self_pairs=True)
    vectors = pairs.vectors(positions, cell, ptr)
    i, _, log_weight = ImageKeys(spectrum.mask, CUTOFF)(pairs, vectors)
    assert torch.equal(i, pairs.index_i)
    r = lengths(vectors)
    truth = spectrum.mask(vectors).exp() * window(r)[:, None]
    torch.testing.assert_close(log_weight.exp(), truth, rtol=1e-9, atol=1e-12)
    assert (log_weight[r >= CUTOFF] == -torch.inf).all()
    assert (r >= CUTOFF).any()


@pytest.mark.parametrize("grouped", [False, True])
def test_image_keys_have_finite_gradients_where_the_window_ends(grouped):
    # The second atom sits on the cutoff of the first, the third on the first atom itself.
    positions = torch.tensor([[0.0, 0, 0], [CUTOFF, 0, 0], [0.0, 0, 0]], requires_grad=True)
    cell, pbc, ptr = torch.zeros(1, 3, 3), torch.zeros(1, 3, dtype=torch.bool), torch.tensor([0, 3])
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF + 1, self_pairs=True)
    layer = ImageKeys(GaussianSpectrum(H, 3, generator=seeded()).mask, CUTOFF)
    groups = pairs.groups() if grouped else None
    keys = layer(pairs, pairs.vectors(positions, cell, ptr), groups)
    x, _ = draw(3, torch.float32)
    x = x.view(3, H, C // H)
    out = image_attention(x, x, x, ptr, *keys)
    (force,) = torch.autograd.grad(out.sin().sum(), positions, create_graph=True)
    assert force.isfinite().all()
    (second,) = torch.autograd.grad(force.square().sum(), positions)
    assert second.isfinite().all()
    torch.testing.assert_close(out[1], x[1])  # sees itself alone


def test_image_keys_without_self_pairs_are_refused():
    positions, cell, pbc, ptr = system_of()
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    with pytest.raises(ValueError, match="self_pairs=True"):
        ImageKeys(lambda x: x[:, :H])(pairs, pairs.vectors(positions, cell, ptr))


def same_parameters(first, second):
    return {id(p) for p in first.parameters()} == {id(p) for p in second.parameters()}


def test_the_parameters_of_a_mask_that_is_a_module_are_those_of_image_keys():
    mask = torch.nn.Linear(3, H)
    assert same_parameters(ImageKeys(mask), mask)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rpe", [True, False])
def test_image_keys_take_f_from_what_has_one_and_train_it(rpe, whole):
    source = GaussianSpectrum(H, 3, generator=seeded())
    if rpe:
        source = FourierRPE(source, GaussianFrequencies(4))
    positions, cell, pbc, ptr = batch(SIZES)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    vectors = pairs.vectors(positions, cell, ptr)
    layer = ImageKeys(source if whole else source.mask, CUTOFF)
    assert same_parameters(layer, source)
    plain = ImageKeys(lambda x: source.mask(x), CUTOFF)
    assert not list(plain.parameters())
    torch.testing.assert_close(layer(pairs, vectors), plain(pairs, vectors), rtol=0, atol=0)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(0.1)
    assert not torch.equal(copied(pairs, vectors).weight, layer(pairs, vectors).weight)
    torch.testing.assert_close(layer(pairs, vectors), plain(pairs, vectors), rtol=0, atol=0)


def test_masks_that_are_none_are_refused():
    with pytest.raises(ValueError, match="expected an object with a method mask"):
        ImageKeys(3.0)
    positions, cell, pbc, ptr = batch((5,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    vectors = pairs.vectors(positions, cell, ptr)
    for mask in (lambda x: x[:, 0], lambda x: x.T):
        with pytest.raises(ValueError, match=r"expected \(P, H\)"):
            ImageKeys(mask)(pairs, vectors)
    with pytest.raises(ValueError, match="vectors have shape"):
        ImageKeys(lambda x: x)(pairs, vectors.norm(dim=-1))
    with pytest.raises(ValueError, match=r"pairs.groups\(\)"):
        ImageKeys(lambda x: x)(pairs, vectors, pairs.without_self().groups())


@pytest.mark.parametrize("part", PARTS)
def test_coincident_atoms_have_finite_gradients(part):
    positions, cell, pbc, ptr = batch((6,))
    positions[1] = positions[0]
    positions.requires_grad_()
    out = PARTS[part](positions, cell, pbc, ptr, torch.arange(6))
    (force,) = torch.autograd.grad(out.sin().sum(), positions, create_graph=True)
    assert force.isfinite().all()
    (second,) = torch.autograd.grad(force.square().sum(), positions)
    assert second.isfinite().all()


@pytest.mark.parametrize("part", PARTS)
def test_first_and_second_derivatives_by_positions_and_cell(part):
    positions, cell, pbc, ptr = batch((6,))
    inputs = [positions.requires_grad_(), cell.requires_grad_()]

    def call(positions, cell):
        return PARTS[part](positions, cell, pbc, ptr, torch.arange(6)).sin().sum()

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("name", FILTERS)
def test_a_system_alone_has_the_output_it_has_in_the_batch(name):
    layer, (positions, cell, pbc, ptr), (x, z) = make_filter(name), system_of(), draw(12)
    together = filtered(layer, x, z, positions, cell, pbc, ptr)
    for b in (0, 2, 3):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        alone = (positions[rows], cell[b : b + 1], pbc[b : b + 1], torch.tensor([0, SIZES[b]]))
        torch.testing.assert_close(
            together[rows], filtered(layer, x[rows], z[rows], *alone), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("ptr", [[0], [0, 0], [0, 1]])
def test_nothing_and_one_atom(name, ptr):
    rows, systems = ptr[-1], len(ptr) - 1
    layer, (x, z) = make_filter(name), draw(rows)
    pbc = torch.zeros(systems, 3, dtype=torch.bool)
    system = torch.zeros(rows, 3, dtype=F64), torch.zeros(systems, 3, 3), pbc, torch.tensor(ptr)
    out = filtered(layer, x, z, *system)
    torch.testing.assert_close(out, layer.out(torch.zeros_like(x)))
    out.sum().backward()
    pairs = neighbor_pairs(*system, CUTOFF)
    weights = make_correction()(pairs, pairs.groups(), pairs.vectors(system[0], *system[1::2]))
    assert weights.weight.shape == (0, H)


@pytest.mark.parametrize("name", FILTERS)
def test_filter_compiles_as_one_graph(name):
    layer, (positions, cell, pbc, ptr), (x, z) = make_filter(name), system_of(), draw(12)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)

    def call(x, positions):
        return layer(x, pairs, pairs.vectors(positions, cell, ptr), z)

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(x, positions)
    expected = call(x, positions)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    inputs = [x, positions, *layer.parameters()]
    seed = torch.ones_like(out)
    for gradient, true in zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-10)


def test_correction_and_image_keys_compile_as_one_graph():
    positions, cell, pbc, ptr = system_of()
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    groups, vectors = pairs.groups(), pairs.vectors(positions, cell, ptr).detach()
    spectrum = GaussianSpectrum(H, 3, generator=seeded()).to(F64)
    layers = make_correction(), ImageKeys(spectrum.mask, CUTOFF)
    calls = (
        lambda v: layers[0](pairs, groups, v).weight,
        lambda v: layers[1](pairs, v, groups).weight,
    )
    for call in calls:
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(vectors), call(vectors), rtol=0, atol=1e-12)


def test_the_filter_exports():
    layer, (positions, cell, pbc, ptr), (x, z) = make_filter("types"), system_of(), draw(12)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    arguments = (x.detach(), pairs, pairs.vectors(positions, cell, ptr).detach(), z)
    exported = torch.export.export(layer, arguments)
    torch.testing.assert_close(exported.module()(*arguments), layer(*arguments))


def test_nothing_of_size_pairs_times_channels_is_kept():
    positions, cell, pbc, ptr = batch((30,))
    channels = 64
    layer = PairFilter(channels, 6.0, T, generator=seeded()).double()
    x = torch.randn(30, channels, generator=seeded(), dtype=F64, requires_grad=True)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 6.0)
    distances = pairs.vectors(positions, cell, ptr).norm(dim=-1)
    kept = kept_sizes(lambda: layer(x, pairs, distances))
    assert len(distances) > 5000
    assert max(kept) <= len(distances) * T


@pytest.mark.parametrize("name", FILTERS)
def test_autocast_keeps_the_geometry_in_float32(name):
    layer, system = make_filter(name, torch.float32), system_of(dtype=torch.float32)
    x, z = draw(12, torch.float32)
    plain = filtered(layer, x, z, *system)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = filtered(layer, x, z, *system)
        gradients = torch.autograd.grad(cast.float().sum(), [x, *layer.parameters()])
        pairs = neighbor_pairs(*system, CUTOFF)
        vectors = pairs.vectors(system[0], system[1], system[3])
        weight = make_correction(torch.float32)(pairs, pairs.groups(), vectors).weight
    assert torch.equal(
        weight, make_correction(torch.float32)(pairs, pairs.groups(), vectors).weight
    )
    assert (cast.float() - plain).abs().max() < 0.03 * plain.abs().max()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_default_dtype_of_float64_and_given_generators():
    torch.set_default_dtype(F64)
    try:
        layer = PairFilter(C, CUTOFF, T, generator=seeded(3))
        assert {p.dtype for p in layer.parameters()} == {F64}
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(layer.weight, make_filter().weight, rtol=0, atol=0)
    torch.manual_seed(5)
    first = PairCorrection(H).weight
    torch.manual_seed(5)
    assert torch.equal(PairCorrection(H).weight, first)


def test_a_generator_decides_all_weights_of_the_filter_and_the_global_one_stays_put():
    def build(seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            layer = PairFilter(C, pair_types=True, hidden_dim=4, generator=seeded(3))
            assert torch.equal(torch.get_rng_state(), before)
            return layer.state_dict()

    first, second = build(1), build(2)
    assert len(first) == 12
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(("bound", "error"), [(5.0, 3e-4), (10.0, 6e-2)])
def test_a_bound_costs_float32_no_more_than_is_stated(bound, error):
    i, j = (x.flatten() for x in torch.meshgrid(torch.arange(50), torch.arange(50), indexing="ij"))
    q, k = (torch.rand(50, H, 16, generator=seeded(n), dtype=F64) for n in (0, 1))
    v = torch.randn(50, H, 4, generator=seeded(2), dtype=F64)
    ptr, weight = torch.tensor([0, 50]), torch.full((2500, H), -bound, dtype=F64)

    def attend(dtype):
        qkv, w = [x.to(dtype) for x in (q, k, v)], torch.expm1(weight.to(dtype))
        return linear.normalised(linear.linear_sums(*qkv, ptr) + pair_sums(*qkv, w, i, j))

    truth = attend(F64)
    found = ((attend(torch.float32) - truth).abs().max() / truth.abs().max()).item()
    assert error / 100 < found < error


@pytest.mark.parametrize("bound", [0.0, -1.0, 10.5, float("inf")])
def test_bounds_without_sense_are_refused(bound):
    with pytest.raises(ValueError, match="bound is"):
        PairCorrection(H, bound=bound)


@pytest.mark.parametrize("cutoff", [0.0, -1.0, float("inf")])
def test_cutoffs_without_sense_are_refused(cutoff):
    for build in (lambda c: ImageKeys(lambda x: x, c), lambda c: PairFilter(C, c)):
        with pytest.raises(ValueError, match="cutoff"):
            build(cutoff)


def test_sizes_without_sense_are_refused():
    for build, name in (
        (lambda: PairFilter(0), "channels"),
        (lambda: PairFilter(C, hidden_dim=0), "hidden_dim"),
        (lambda: PairCorrection(0), "num_heads"),
        (lambda: PairTypes(rank=0), "rank"),
    ):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            build()


REFUSED = {
    "short x": (lambda a: a | {"x": a["x"][:3]}, "x has 3 rows"),
    "padded x": (lambda a: a | {"x": a["x"][None]}, r"pack padded rows"),
    "x of another width": (lambda a: a | {"x": a["x"][:, :4]}, r"expected \(N, 6\)"),
    "fewer vectors": (lambda a: a | {"vectors": a["vectors"][:5]}, "vectors have shape"),
    "flat vectors": (lambda a: a | {"vectors": a["vectors"][:, :2]}, "vectors have shape"),
    "whole vectors": (lambda a: a | {"vectors": a["vectors"].long()}, "torch.int64"),
    "element 119": (lambda a: a | {"z": a["z"].index_fill(0, a["z"][:1] * 0, 119)}, "to 119"),
    "element 0": (lambda a: a | {"z": a["z"].index_fill(0, a["z"][:1] * 0, 0)}, "run from 0"),
    "negative elements": (lambda a: a | {"z": -a["z"]}, "atomic_numbers run from"),
    "elements as numbers": (lambda a: a | {"z": a["z"].double()}, r"atomic_numbers.long\(\)"),
    "fewer elements": (lambda a: a | {"z": a["z"][:3]}, "atomic_numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_to_the_pairs_is_refused(case):
    positions, cell, pbc, ptr = batch((6,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    x, z = draw(6)
    given = {"x": x, "vectors": pairs.vectors(positions, cell, ptr), "z": z}
    change, message = REFUSED[case]
    bad = change(given)
    with pytest.raises(ValueError, match=message):
        make_filter("types")(bad["x"], pairs, bad["vectors"], bad["z"])
    if "x" not in case.split():
        with pytest.raises(ValueError, match=message):
            make_correction(pair_types=True)(pairs, pairs.groups(), bad["vectors"], bad["z"])


def test_groups_of_other_pairs_are_refused():
    positions, cell, pbc, ptr = batch((6,))
    pairs = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF)
    others = neighbor_pairs(positions, cell, pbc, ptr, CUTOFF, self_pairs=True)
    vectors = pairs.vectors(positions, cell, ptr)
    same_size = type(pairs)(pairs.index_i, pairs.index_j.flip(0), pairs.shift)
    for bad in (others.groups(), same_size.groups()):
        with pytest.raises(ValueError, match=r"pairs.groups\(\)"):
            make_correction()(pairs, bad, vectors)


def test_types_refuse_elements_that_are_none():
    r, i = torch.ones(2), torch.tensor([1, 8])
    for bad in (torch.tensor([1, -8]), torch.tensor([1, 119]), torch.ones(2), torch.tensor([1])):
        with pytest.raises(ValueError, match="elements|atomic_numbers"):
            PairTypes()(r, i, bad)
