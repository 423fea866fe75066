"""The mask: its mean is f, its variance what theory says (5 standard errors, fixed seeds)."""

import math

import pytest
import torch

from flt_mol.functional.groups import centred
from flt_mol.functional.reference import relative_mask
from flt_mol.nn.frequencies import ComponentFrequencies, GaussianFrequencies, LatticeFrequencies
from flt_mol.nn.rpe import FourierRPE, relative_positions
from flt_mol.nn.spectrum import DirectionalSpectrum, GaussianSpectrum, Spectrum

F64 = torch.float64
SPLITS = ["one_sided", "symmetric", "balanced"]
X = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0.6, -0.8, 0.3], [1.5, 1.0, 0], [3.0, 3.0, -3.0]])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(num_frequencies=8, split="one_sided", dim=3, sigma=(0.1, 0.25), heads=3, **settings):
    generator = seeded(7)
    spectrum = GaussianSpectrum(heads, 4, dim, sigma_max=2.0, generator=generator)
    frequencies = GaussianFrequencies(num_frequencies, dim, sigma, generator=generator, **settings)
    return FourierRPE(spectrum, frequencies, split).double()


def masks_of_many_draws(rpe, displacements, count):
    """N̂ for `count` independent draws of the frequencies: (count, K, H)."""
    generator, masks = seeded(11), []
    with torch.no_grad():
        for _ in range(count):
            rpe.frequencies.draw.normal_(generator=generator)
            masks.append(rpe.sampled_mask(displacements))
    return torch.stack(masks)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_mean_of_the_sampled_mask_is_the_closed_form(dim, shared):
    rpe = build(dim=dim, sigma=0.16 if shared else (0.1, 0.25), shared_sigma=shared)
    x = X[:, :dim].double()
    masks = masks_of_many_draws(rpe, x, 4000)
    error = masks.std(0) / math.sqrt(len(masks))
    f = rpe.mask(x)
    assert ((masks.mean(0) - f).abs() < 5 * error + 1e-12).all()
    # Sharp enough to see a lost factor 2, 2π or 1/R where the mask is large.
    assert (error[0] < 0.1 * f[0].abs()).any()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_variance_of_a_matched_mask_is_known_and_below_the_papers_bound(dim):
    # One Gaussian of width s and frequencies of width 1/(2πs): ρ = c = a for every ξ, so
    # Var N̂ = (c² (1 + e^{-(2x)²/2s²})/2 − f²)/R, below the paper's bound (c² − f²)/R.
    s, c, num_frequencies, count = 1.3, 1.75, 4, 4000
    spectrum = GaussianSpectrum(1, 1, dim, sigma_min=s, sigma_max=s)
    torch.nn.init.constant_(spectrum.amplitude, c)
    frequencies = GaussianFrequencies(
        num_frequencies, dim, 1 / (2 * math.pi * s), shared_sigma=True, generator=seeded()
    )
    rpe, x = FourierRPE(spectrum, frequencies).double(), X[:, :dim].double()
    torch.testing.assert_close(
        rpe.ratio()[1], torch.full((1, num_frequencies), c, dtype=F64), rtol=1e-6, atol=0
    )
    masks = masks_of_many_draws(rpe, x, count)[..., 0]
    f = rpe.mask(x)[:, 0]
    double = torch.exp(-(2 * x).square().sum(-1) / (2 * s**2))
    expected = (c**2 * (1 + double) / 2 - f.square()) / num_frequencies
    variance = masks.var(0)
    fourth = (masks - masks.mean(0)).pow(4).mean(0)
    error = ((fourth - variance.square()).clamp(min=0) / count).sqrt()
    assert ((variance - expected).abs() < 5 * error + 1e-6).all()
    assert (error[-1] < 0.1 * expected[-1]).all()
    assert (variance <= (c**2 - f.square()) / num_frequencies + 5 * error + 1e-6).all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_variance_is_below_the_bound_for_sums_of_gaussians(shared):
    # 2πσs ≥ 1 for every term, so that c = max |g/p| is finite; it is found on a radial grid.
    # With a σ per frequency the set is a stratified sample of p, whose variance is smaller.
    rpe = build(sigma=0.16 if shared else (0.16, 0.3), shared_sigma=shared, heads=4)
    radius = torch.linspace(0, 2, 4001, dtype=F64)
    grid = torch.stack([radius, 0 * radius, 0 * radius], dim=-1)
    with torch.no_grad():
        ratio = rpe.spectrum(grid) * (-rpe.frequencies.log_density(grid)).exp()
        c = ratio.abs().amax(-1)
        masks = masks_of_many_draws(rpe, X.double(), 4000)
        bound = (c**2 - rpe.mask(X.double()).square()) / rpe.frequencies.num_frequencies
    variance = masks.var(0)
    fourth = (masks - masks.mean(0)).pow(4).mean(0)
    error = ((fourth - variance.square()).clamp(min=0) / len(masks)).sqrt()
    assert (variance <= bound + 5 * error).all()
    assert (variance > 1e-3 * bound).any()  # not satisfied by a mask that does not vary


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_products_of_features_are_the_sampled_mask_within_each_system(split, dim):
    rpe = build(split=split, dim=dim)
    positions = 4 * torch.randn(7, dim, generator=seeded(), dtype=F64)
    features = rpe(positions, torch.tensor([0, 3, 3, 7]))
    assert rpe.num_features == features.basis.shape[-1] == 16
    mask = relative_mask(features.query, features.key)
    expected = rpe.sampled_mask(positions[:, None] - positions[None]).permute(2, 0, 1)
    for rows in (slice(0, 3), slice(3, 7)):
        torch.testing.assert_close(mask[:, rows, rows], expected[:, rows, rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [2.0**10, 2.0**17])
def test_translation_changes_nothing(shift):
    # Multiples of 1/64 stay exact in float32 after a shift by 2^17 Å.
    rpe, ptr = build().float(), torch.tensor([0, 20, 50])
    positions = torch.randint(-640, 640, (50, 3), generator=seeded()).float() / 64
    expected, moved = rpe(positions, ptr), rpe(positions + shift, ptr)
    torch.testing.assert_close(moved.basis, expected.basis, rtol=0, atol=2e-5)


def test_a_system_alone_or_in_a_batch():
    rpe = build().float()
    positions = 5 * torch.randn(30, 3, generator=seeded())
    positions[20:] = float("nan")
    batch = rpe(positions, torch.tensor([0, 12, 20, 30]))
    alone = rpe(positions[12:20])
    torch.testing.assert_close(batch.key[12:20], alone.key, rtol=0, atol=1e-6)
    torch.testing.assert_close(batch.query[12:20], alone.query, rtol=0, atol=1e-6)


def test_every_parameter_gets_a_gradient_and_bounded_memory_of_heads():
    rpe = build()
    features = rpe(4 * torch.randn(6, 3, generator=seeded(), dtype=F64))
    assert features.query_weight.shape == (1, 16)  # one-sided: no copy per head
    (features.query * features.key).sin().sum().backward()
    for name, parameter in rpe.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_autocast_and_save_and_load_change_nothing():
    rpe = build().float()
    positions = 5 * torch.randn(10, 3, generator=seeded())
    expected = rpe(positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, want in zip(rpe(positions)[:3], expected[:3], strict=True):
            assert torch.equal(got, want)
    other = FourierRPE(GaussianSpectrum(3, 4), GaussianFrequencies(8))
    other.load_state_dict(rpe.state_dict())
    for got, want in zip(other(positions)[:3], expected[:3], strict=True):
        assert torch.equal(got, want)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="dimensions"):
        FourierRPE(GaussianSpectrum(1, 1, dim=2), GaussianFrequencies(4, dim=3))
    with pytest.raises(ValueError, match="got GaussianFrequencies and GaussianSpectrum"):
        FourierRPE(GaussianFrequencies(4), GaussianSpectrum(1, 1))
    with pytest.raises(ValueError, match="got GaussianSpectrum and Tensor"):
        FourierRPE(GaussianSpectrum(1, 1), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="split"):
        build(split="half")
    with pytest.raises(ValueError, match="positions have shape"):
        build()(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="ptr"):
        build()(torch.zeros(4, 3), torch.tensor([0, 3]))


@pytest.mark.parametrize("split", SPLITS)
def test_derivatives_to_spectrum_and_frequencies(split):
    rpe = build(num_frequencies=3, split=split, heads=2)
    positions = 2 * torch.randn(3, 3, generator=seeded(), dtype=F64)
    parameters = dict(rpe.named_parameters())

    def features(*values):
        changed = dict(zip(parameters, values, strict=True))
        at = torch.func.functional_call(rpe, changed, (positions,))
        return at.query, at.key

    assert torch.autograd.gradcheck(features, tuple(parameters.values()))


def test_the_mean_over_draws_does_not_depend_on_the_width_they_are_drawn_with():
    # So a σ that is learned while draws are renewed would follow noise alone.
    rpe, generator = build(num_frequencies=4, heads=1), seeded(11)
    slopes = []
    for _ in range(1500):
        rpe.frequencies.draw.normal_(generator=generator)
        value = rpe.sampled_mask(X[2].double()).sum()
        slopes += torch.autograd.grad(value, rpe.frequencies.log_sigma)
    slopes = torch.stack(slopes)
    error = slopes.std(0) / math.sqrt(len(slopes))
    assert (error > 0).all()
    assert (slopes.mean(0).abs() < 5 * error).all()


def build_complex(split="one_sided", dim=3):
    spectrum = DirectionalSpectrum(2, 4, dim, sigma_max=2.0, generator=seeded(1))
    frequencies = GaussianFrequencies(6, dim, (0.1, 0.25), generator=seeded(2))
    return FourierRPE(spectrum, frequencies, split).double()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dim", [1, 3])
def test_products_of_directional_features_are_the_sampled_mask(split, dim):
    rpe = build_complex(split, dim)
    xi, ratio = rpe.ratio()
    assert ratio.is_complex()
    positions = 3 * torch.randn(6, dim, generator=seeded(), dtype=F64)
    features = rpe(positions)
    x = positions[:, None] - positions[None]
    waves = torch.exp(2j * math.pi * (x[..., None, :] * xi).sum(-1))
    expected = (waves[..., None, :] * ratio).real.mean(-1)
    torch.testing.assert_close(rpe.sampled_mask(x), expected, rtol=0, atol=1e-12)
    product = relative_mask(features.query, features.key)
    torch.testing.assert_close(product, expected.permute(2, 0, 1), rtol=0, atol=1e-12)
    assert (product - product.mT).abs().max() > 1e-2  # it knows a direction


ORIGINS = ["mean", "first", "points"]
PTR = torch.tensor([0, 3, 3, 7, 7])


def origin_of(name, systems=4):
    points = torch.randn(systems, 3, generator=seeded(3), dtype=F64)
    return points if name == "points" else name


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_product_of_features_does_not_depend_on_the_origin(origin):
    rpe, positions = build(), 4 * torch.randn(7, 3, generator=seeded(), dtype=F64)
    features = rpe(positions, PTR, origin=origin_of(origin))
    mask = relative_mask(features.query, features.key)
    expected = rpe.sampled_mask(positions[:, None] - positions[None]).permute(2, 0, 1)
    for rows in (slice(0, 3), slice(3, 7)):
        torch.testing.assert_close(mask[:, rows, rows], expected[:, rows, rows], rtol=0, atol=1e-12)


def test_positions_relative_to_each_origin():
    positions = torch.randn(7, 3, generator=seeded(), dtype=F64)
    points = origin_of("points")
    for rows, system in ((slice(0, 3), 0), (slice(3, 7), 2)):
        own = positions[rows]
        for origin, point in (("mean", own.mean(0)), ("first", own[0]), (points, points[system])):
            got = relative_positions(positions, PTR, origin)[rows]
            torch.testing.assert_close(got, own - point, rtol=0, atol=1e-14)
    torch.testing.assert_close(relative_positions(positions, PTR, "mean"), centred(positions, PTR))


INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float16, torch.bfloat16])
def test_positions_of_every_dtype_are_read_as_they_are(dtype, origin):
    positions = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 1, 0]]).to(dtype)
    if dtype != torch.bool:
        positions = 120 * positions  # sums of two leave uint8, differences too
    ptr, points = torch.tensor([0, 3, 4]), origin_of(origin, 2)
    got = relative_positions(positions, ptr, points)
    expected = relative_positions(positions.double(), ptr, points)
    half = dtype.is_floating_point and origin == "points"
    assert got.dtype == (F64 if half else torch.float32)  # the points are in float64
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    points = points if origin != "points" else points.to(torch.bfloat16)
    assert relative_positions(positions, ptr, points).dtype == torch.float32


@pytest.mark.parametrize("shift", [2**24 + 1, 2**40 + 3])
@pytest.mark.parametrize("origin", ["mean", "first", "integers", "floats"])
def test_integers_keep_all_their_digits(shift, origin):
    rows = torch.tensor([[0], [1], [5], [2], [-4]])
    ptr, system = torch.tensor([0, 3, 5]), torch.tensor([0, 0, 0, 1, 1])
    points = {"integers": torch.tensor([[3], [4]]), "floats": torch.tensor([[3.0], [4.5]])}
    expected = relative_positions(rows.double(), ptr, points.get(origin, origin))
    if origin == "floats":
        # The nearest float of the origin is that of the queries and of the keys.
        far = (points["floats"] + shift).requires_grad_()
        expected = rows + (shift - far.detach().double())[system]
        got = relative_positions(rows + shift, ptr, far)
        (slope,) = torch.autograd.grad(got.sum(), far)
        assert slope.flatten().tolist() == [-3, -2]
    elif origin == "integers":
        got = relative_positions(rows + shift, ptr, points["integers"] + shift)
    else:
        got = relative_positions(rows + shift, ptr, origin)
    torch.testing.assert_close(got.detach().double(), expected.double(), rtol=0, atol=1e-6)


def test_float_positions_and_a_far_integer_origin():
    positions = torch.tensor([[2.0**24 + 2], [2.0**24 + 4]], requires_grad=True)
    got = relative_positions(positions, torch.tensor([0, 2]), torch.tensor([[2**24 + 1]]))
    assert got.flatten().tolist() == [1, 3]
    (slope,) = torch.autograd.grad(got.sum(), positions)
    assert slope.flatten().tolist() == [1, 1]


def test_complex_positions_are_refused():
    rpe, positions = build(), torch.zeros(7, 3, dtype=torch.complex64)
    with pytest.raises(ValueError, match="positions are complex"):
        rpe(positions, PTR)
    with pytest.raises(ValueError, match="origin are complex"):
        rpe(positions.real, PTR, origin=positions[:4])


def test_with_the_first_position_as_origin_no_row_knows_of_later_ones():
    rpe, positions = build(), 4 * torch.randn(7, 3, generator=seeded(), dtype=F64)
    expected = rpe(positions, PTR, origin="first").basis
    for row in range(1, 7):
        changed = positions.clone()
        changed[row:] = 9.0
        same = [n for n in range(row) if not (row <= 3 <= n)]
        got = rpe(changed, PTR, origin="first").basis
        assert torch.equal(got[same], expected[same])
    assert not torch.equal(rpe(changed, PTR).basis[3:6], rpe(positions, PTR).basis[3:6])


@pytest.mark.parametrize("origin", ORIGINS)
def test_nothing_leaks_from_other_systems_not_even_gradients_or_nan(origin):
    rpe, positions = build(), 4 * torch.randn(7, 3, generator=seeded(), dtype=F64)
    alone = positions[3:].clone().requires_grad_()
    points = origin_of(origin)
    own = points[2:3] if origin == "points" else points
    expected = rpe(alone, origin=own)
    (slope,) = torch.autograd.grad(expected.key.sin().sum(), alone)
    positions[:3] = math.nan
    positions.requires_grad_()
    features = rpe(positions, PTR, origin=points)
    torch.testing.assert_close(features.key[3:], expected.key, rtol=0, atol=1e-13)
    (gradient,) = torch.autograd.grad(features.key[3:].sin().sum(), positions)
    torch.testing.assert_close(gradient[3:], slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("systems", [0, 2])
def test_nothing_at_all_gives_nothing(origin, systems):
    ptr = torch.zeros(systems + 1, dtype=torch.int64)
    features = build()(torch.zeros(0, 3, dtype=F64), ptr, origin=origin_of(origin, systems))
    assert features.basis.shape == (0, 16)
    assert features.key.shape == (0, 3, 16)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("kind", [build, build_complex])
def test_derivatives_of_all_orders_to_positions(origin, kind):
    rpe, points = kind(), origin_of(origin, 3)
    positions = 2 * torch.randn(4, 3, generator=seeded(), dtype=F64, requires_grad=True)

    def features(x):
        at = rpe(x, torch.tensor([0, 3, 3, 4]), origin=points)
        return at.query.sum(1), at.key.sum(1)

    assert torch.autograd.gradcheck(features, positions)
    assert torch.autograd.gradgradcheck(features, positions)


@pytest.mark.parametrize("origin", ["mean", "first"])
def test_forces_of_anything_made_of_the_features_add_up_to_zero(origin):
    positions = 2 * torch.randn(7, 3, generator=seeded(), dtype=F64, requires_grad=True)
    features = build()(positions, PTR, origin=origin)
    (force,) = torch.autograd.grad((features.key * features.query).exp().sum(), positions)
    assert force.abs().max() > 1e-3
    assert force[:3].sum(0).abs().max() < 1e-12
    assert force[3:].sum(0).abs().max() < 1e-12


def component(heads=2):
    spectrum = GaussianSpectrum(heads, 3, generator=seeded(1))
    return FourierRPE(spectrum, ComponentFrequencies.of(spectrum, 6, generator=seeded(2)))


def lattice():
    return FourierRPE(GaussianSpectrum(2, 3, generator=seeded(1)), LatticeFrequencies(4.0, 4.0))


@pytest.mark.parametrize(
    ("kind", "origin"),
    [(build, "mean"), (build_complex, "first"), (component, "points"), (lattice, "mean")],
)
def test_forward_compiles_without_a_break(kind, origin):
    torch._dynamo.reset()
    rpe = kind().double()
    compiled = torch.compile(rpe, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ([3, 0, 4], [5, 2, 0]):
        rows = sum(sizes)
        positions = torch.randn(rows, 3, generator=seeded(), dtype=F64)
        ptr = torch.tensor([0, *sizes]).cumsum(0)
        point = origin_of(origin, 3)
        got, want = compiled(positions, ptr, origin=point), rpe(positions, ptr, origin=point)
        torch.testing.assert_close(got.key, want.key, rtol=0, atol=1e-12)
        torch.testing.assert_close(got.query, want.query, rtol=0, atol=1e-12)


def test_forward_is_exported_for_any_number_of_rows():
    rpe = build()
    positions = torch.randn(7, 3, generator=seeded(), dtype=F64)
    shapes = {
        "positions": {0: torch.export.Dim("rows")},
        "ptr": {0: torch.export.Dim("offsets", min=3)},
    }
    program = torch.export.export(rpe, (positions, PTR), dynamic_shapes=shapes)
    larger, ptr = torch.cat([positions, positions + 1]), torch.tensor([0, 9, 14])
    got, want = program.module()(larger, ptr), rpe(larger, ptr)
    torch.testing.assert_close(got.key, want.key, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [build, build_complex, component, lattice])
def test_float32_agrees_with_float64(kind):
    rpe = kind().double()
    positions = 100 + 4 * torch.randn(7, 3, generator=seeded())
    expected = rpe(positions.double(), PTR)
    got = rpe.float()(positions, PTR)
    assert got.basis.dtype == got.key_weight.dtype == torch.float32
    for one, other in zip((got.query, got.key), (expected.query, expected.key), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_origins_that_do_not_fit_are_refused():
    rpe, positions = build(), torch.zeros(7, 3, dtype=F64)
    with pytest.raises(ValueError, match="origin is 'last'"):
        rpe(positions, PTR, origin="last")
    with pytest.raises(ValueError, match=r"expected \(4, 3\)"):
        rpe(positions, PTR, origin=torch.zeros(3, 3))


def test_a_spectrum_of_another_shape_is_refused():
    class Flat(Spectrum):
        def forward(self, frequencies):
            return frequencies.square().sum(-1)

    rpe = FourierRPE(Flat(4, 3), GaussianFrequencies(16))
    with pytest.raises(ValueError, match=r"g of Flat has shape \(16,\) .* = \(4, 16\)"):
        rpe(torch.zeros(2, 3))
