"""What holds for every family: shapes, symmetry, estimators, gradients, precision, draws."""

import copy
import io
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from flt_mol.nn.spectrum import SPECTRA, KernelSpectrum, ProductSpectrum

F64 = torch.float64
DIMS = pytest.mark.parametrize("dim", [1, 2, 3])
VARIANTS = {
    **{name: (name, {}) for name in SPECTRA},
    "gaussian, weights": ("gaussian", {"form": "weight"}),
    "mixture, weights": ("gaussian_mixture", {"form": "weight"}),
    "directional, weights": ("directional", {"form": "weight"}),
    "matern 1/2": ("matern", {"nu": 0.5}),
    "matern 5/2": ("matern", {"nu": 2.5}),
    "laplace, separable": ("laplace", {"form": "separable"}),
    "cauchy, rational": ("cauchy", {"form": "rational"}),
    "cauchy, separable": ("cauchy", {"form": "separable"}),
    "tent, weights": ("tent", {"form": "weight"}),
    "bspline 3": ("bspline", {"order": 3}),
    "bspline, weights": ("bspline", {"form": "weight"}),
}
KERNELS = ["matern", "matern 1/2", "matern 5/2", "laplace", "cauchy"]
KERNELS += ["cauchy, rational", "laplace, separable", "cauchy, separable"]
ALL = pytest.mark.parametrize("name", VARIANTS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(name, dim=3, num_heads=2, num_terms=3, **settings):
    if (name, dim) == ("cauchy, rational", 2):
        pytest.skip("not known in two dimensions")
    family, changes = VARIANTS[name]
    settings = {"generator": seeded(), **changes, **settings}
    return SPECTRA[family](num_heads, num_terms, dim, **settings)


def normal(*shape, scale=1.0, seed=1):
    return scale * torch.randn(*shape, generator=seeded(seed), dtype=F64)


@ALL
@DIMS
def test_shapes_and_dtypes(name, dim):
    spectrum = build(name, dim, num_heads=4)
    g = spectrum(torch.rand(7, dim))
    assert g.shape == (4, 7)
    assert g.is_complex() == spectrum.is_complex == name.startswith("directional")
    assert spectrum(torch.zeros(0, dim)).shape == (4, 0)
    assert spectrum.mask(torch.zeros(dim)).shape == (4,)
    assert spectrum.mask(torch.zeros(5, 6, dim)).shape == (5, 6, 4)
    assert spectrum.mask(torch.zeros(5, dim)).dtype == torch.float32
    assert spectrum.mask(torch.zeros(5, dim, dtype=F64)).dtype == F64
    assert (spectrum.num_heads, spectrum.dim, spectrum.num_terms) == (4, dim, 3)


@ALL
def test_each_head_may_have_frequencies_of_its_own(name):
    spectrum = build(name).double()
    xi = normal(2, 5, 3, scale=0.2)
    expected = torch.stack([spectrum(xi[0])[0], spectrum(xi[1])[1]])
    torch.testing.assert_close(spectrum(xi), expected, rtol=1e-14, atol=1e-14)
    for shape in [(5, 2), (3, 5, 3), (2, 2, 5, 3), (3,)]:
        with pytest.raises(ValueError, match=r"expected \(R, 3\) or \(2, R, 3\)"):
            spectrum(torch.zeros(shape))
    with pytest.raises(ValueError, match="over 3 dimensions"):
        spectrum.mask(torch.zeros(5, 2))


@ALL
@DIMS
def test_masks_are_real_and_those_of_real_spectra_symmetric(name, dim):
    spectrum, xi, x = build(name, dim).double(), normal(9, dim, scale=0.2), normal(9, dim, seed=2)
    torch.testing.assert_close(spectrum(-xi), spectrum(xi).conj(), rtol=1e-13, atol=1e-13)
    change = (spectrum.mask(-x) - spectrum.mask(x)).abs()
    if spectrum.is_complex:
        assert spectrum(xi).imag.abs().max() > 0.01
        assert change.max() > 0.1
    else:
        assert change.max() < 1e-14


@pytest.mark.parametrize(
    "name", ["gaussian", "matern", "laplace", "cauchy", "cauchy, rational", "shells"]
)
def test_isotropic_families_do_not_see_rotations(name):
    spectrum, x = build(name).double(), normal(9, 3)
    turn = torch.linalg.qr(normal(3, 3, seed=4)).Q
    torch.testing.assert_close(spectrum.mask(x @ turn), spectrum.mask(x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(spectrum(x @ turn / 5), spectrum(x / 5), rtol=1e-12, atol=1e-13)


@ALL
@DIMS
def test_all_heads_have_about_the_same_size_at_the_start(name, dim):
    # The standard deviation of f(0) over heads is 1, or that of the greatest value of f where f(0)
    # is something else (shells, waves).
    mask = build(name, dim, num_heads=500, num_terms=6).mask(torch.zeros(dim))
    expected = {"shells": 6**-0.5, "directional": 0.5**0.5, "directional, weights": 0.5**0.5}
    assert mask.std().item() == pytest.approx(expected.get(name, 1.0), rel=0.15)


def heavy_tailed(count, dim, separable, scale):
    """ξ (R, ℓ) and p(ξ): Cauchy in each coordinate, or multivariate Cauchy. In closed form."""
    generator = seeded(5)
    numerator = torch.randn(count, dim, generator=generator, dtype=F64)
    shape = (count, dim if separable else 1)
    ratio = numerator / torch.randn(shape, generator=generator, dtype=F64)
    if separable:
        density = (1 / (math.pi * scale * (1 + ratio.square()))).prod(-1)
    else:
        power = (dim + 1) / 2
        constant = math.gamma(power) / (math.pi**power * scale**dim)
        density = constant * (1 + ratio.square().sum(-1)) ** -power
    return scale * ratio, density


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "box"])
@DIMS
def test_the_mean_over_drawn_frequencies_is_the_mask(name, dim):
    spectrum = build(name, dim, generator=seeded(7)).double().requires_grad_(False)
    separable = "separable" in name or "spline" in name or "tent" in name
    scale = 0.05 if separable and "laplace" not in name else 0.1
    xi, density = heavy_tailed(40_000, dim, separable, scale)
    ratio = spectrum(xi) / density
    x = torch.tensor([[0.0, 0, 0], [0.7, 0, 0], [-0.6, 0.8, 0.3], [2, -1, 1]], dtype=F64)[:, :dim]
    f = spectrum.mask(x)
    phase = 2 * math.pi * x @ xi.T
    wave = torch.polar(torch.ones_like(phase), phase)[:, None]
    samples = (ratio * wave).real
    error = samples.std(-1) / math.sqrt(len(xi))
    slack = 1e-5 if name == "cauchy, rational" else 1e-12
    assert ((samples.mean(-1) - f).abs() < 5 * error + slack).all()
    # Sharp enough to see a lost factor of 2 or 2π.
    assert (error[0] < 0.1 * f[0].abs()).any()


@pytest.mark.parametrize("name", KERNELS)
@DIMS
def test_kernels_give_frequencies_of_their_own_density(name, dim):
    spectrum = build(name, dim, 1, 1).double().requires_grad_(False)
    spectrum.log_length.copy_(0.2 * normal(*spectrum.log_length.shape))
    spectrum.amplitude.fill_(1.0)
    assert isinstance(spectrum, KernelSpectrum)
    draws = spectrum.standard_draws(50_000, seeded(2))
    assert draws.dtype == torch.float32
    assert torch.equal(draws[:0], spectrum.standard_draws(0, seeded(2)))
    xi = draws.double() / spectrum.lengths[0, 0]
    x = torch.tensor([[0.3, 0, 0], [-0.6, 0.8, 0.3], [2, -1, 1]], dtype=F64)[:, :dim]
    waves = (2 * math.pi * x @ xi.T).cos()
    error = waves.std(-1) / math.sqrt(len(xi))
    assert ((waves.mean(-1) - spectrum.mask(x)[:, 0]).abs() < 5 * error).all()
    # g is that density: of any other set, the mean of g over it would differ.
    assert error.max() < 0.005


def parameters_of(spectrum):
    names = [name for name, _ in spectrum.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in spectrum.parameters()]
    return names, values


@ALL
@pytest.mark.parametrize("dim", [1, 3])
def test_gradients_of_the_spectrum(name, dim):
    spectrum = build(name, dim, 2, 2).double()
    names, values = parameters_of(spectrum)
    xi = normal(3, dim, scale=0.2).requires_grad_()

    def run(xi, *values):
        g = functional_call(spectrum, dict(zip(names, values, strict=True)), (xi,))
        return torch.view_as_real(g) if g.is_complex() else g

    assert gradcheck(run, (xi, *values))
    assert gradgradcheck(run, (xi, *values))


@ALL
@pytest.mark.parametrize("dim", [1, 3])
def test_gradients_of_the_mask(name, dim):
    spectrum = build(name, dim, 2, 2).double()
    names, values = parameters_of(spectrum)
    x = normal(3, dim).requires_grad_()

    class Mask(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.spectrum = spectrum

        def forward(self, x):
            return self.spectrum.mask(x)

    module = Mask()

    def run(x, *values):
        weights = {f"spectrum.{name}": v for name, v in zip(names, values, strict=True)}
        return functional_call(module, weights, (x,))

    assert gradcheck(run, (x, *values))
    if name != "box":
        assert gradgradcheck(run, (x, *values))


@ALL
@DIMS
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_gradients_are_finite_at_the_origin_and_far_away(name, dim, dtype):
    spectrum = build(name, dim).to(dtype)
    points = torch.tensor([0.0, 1e-30, 1e-8, 1e-3, 50.0, 1e4], dtype=dtype)
    points = torch.stack([points[:, None].expand(-1, dim), points[:, None] * torch.eye(dim)[0]])
    points = points.reshape(-1, dim).to(dtype).requires_grad_()
    for output in (spectrum(points), spectrum.mask(points)):
        spectrum.zero_grad()
        points.grad = None
        output = torch.view_as_real(output) if output.is_complex() else output
        assert output.isfinite().all()
        if output.requires_grad:
            grads = torch.autograd.grad(
                output.sum(), [points, *spectrum.parameters()], create_graph=True, allow_unused=True
            )
            grads = [grad for grad in grads if grad is not None]
            assert all(grad.isfinite().all() for grad in grads)
            second = sum(grad.sum() for grad in grads)
            if second.requires_grad:
                second.backward()
            for p in (points, *spectrum.parameters()):
                assert p.grad is None or p.grad.isfinite().all()


@ALL
def test_every_parameter_gets_a_gradient(name):
    spectrum, x = build(name, num_heads=4), normal(6, 3).float()
    for output, what in ((spectrum(x / 10), "spectrum"), (spectrum.mask(x), "mask")):
        spectrum.zero_grad()
        output.abs().square().sum().backward()
        for key, parameter in spectrum.named_parameters():
            if (name, what, key) == ("box", "mask", "log_length"):
                assert parameter.grad is None  # a box is flat: only its spectrum feels the radii
            else:
                assert (parameter.grad != 0).all(), (what, key)
    assert spectrum.mask(x).std(-1).max() > 0


@ALL
def test_precision(name):
    spectrum, xi, x = build(name), normal(9, 3, scale=0.1), normal(9, 3)
    exact = copy.deepcopy(spectrum).double()
    torch.testing.assert_close(
        spectrum(xi.float()).cdouble(), exact(xi).cdouble(), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(
        spectrum.mask(x.float()).double(), exact.mask(x), rtol=1e-5, atol=1e-6
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(spectrum(xi.float()), spectrum.float()(xi.float()))
        assert spectrum.mask(x.float()).dtype == torch.float32
    # In bfloat16 the parameters are coarse, but what is computed from them is not.
    coarse = copy.deepcopy(spectrum).bfloat16()
    exact = copy.deepcopy(coarse).double()
    g, f = coarse(xi.float()), coarse.mask(x.float())
    assert f.dtype == torch.float32
    torch.testing.assert_close(g.cdouble(), exact(xi).cdouble(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(f.double(), exact.mask(x), rtol=1e-4, atol=1e-5)
    f.square().sum().backward()
    assert coarse.mask(x.bfloat16()).dtype == torch.float32


@ALL
def test_the_default_dtype_decides_the_parameters_but_not_the_draws(name):
    single = build(name)
    torch.set_default_dtype(F64)
    try:
        double = build(name)
        xi, x = normal(4, 3, scale=0.1), normal(4, 3)
        assert double(xi.float()).dtype == (torch.complex128 if double.is_complex else F64)
        assert double.mask(x.float()).dtype == F64
    finally:
        torch.set_default_dtype(torch.float32)
    for (key, a), (same, b) in zip(
        single.state_dict().items(), double.state_dict().items(), strict=True
    ):
        assert key == same
        assert (a.dtype, b.dtype) == (torch.float32, F64)
        torch.testing.assert_close(a, b.float(), rtol=1e-6, atol=0)


@ALL
def test_the_generator_decides_and_the_global_one_stays_put(name):
    state = torch.get_rng_state()
    first, again = build(name).state_dict(), build(name).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    torch.manual_seed(1)
    third = build(name, generator=None).state_dict()
    torch.manual_seed(1)
    again = build(name, generator=None).state_dict()
    assert all(torch.equal(third[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)


@ALL
def test_saved_and_loaded(name):
    spectrum, other = build(name), build(name, generator=seeded(9))
    file, x = io.BytesIO(), normal(5, 3).float()
    torch.save(spectrum.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.mask(x), spectrum.mask(x))
    assert torch.equal(other(x), spectrum(x))


@ALL
def test_repr_names_the_family_and_its_settings(name):
    spectrum = build(name)
    family, settings = VARIANTS[name]
    text = repr(spectrum)
    assert text.startswith(f"{SPECTRA[family].__name__}(num_heads=2, num_terms=3, dim=3")
    for key, value in settings.items():
        assert f"{key}={value!r}" in text


@pytest.mark.parametrize("name", SPECTRA)
def test_settings_that_make_no_sense_are_refused(name):
    for settings in ({"num_heads": 0}, {"dim": 0}, {"num_terms": 0}):
        with pytest.raises(ValueError, match="≥ 1"):
            build(name, **settings)


def test_products_of_unlike_families_have_shapes_and_gradients():
    spectrum = ProductSpectrum(build("directional", 1), build("bspline", 2))
    assert spectrum.is_complex
    assert spectrum.dim == 3
    g = spectrum(torch.rand(2, 5, 3))
    assert g.shape == (2, 5)
    assert g.is_complex()
    (g.abs().sum() + spectrum.mask(torch.rand(4, 3)).sum()).backward()
    assert all((p.grad != 0).all() for p in spectrum.parameters())
