"""FourierRPE: features whose product is the sampled mask, whatever the layout."""

import copy
import math
import sys

import pytest
import torch

from flt_mol.functional import fourier_basis, position_features
from flt_mol.functional.fourier import SPLITS, PositionFeatures, phases, quarter_turn
from flt_mol.nn import FREQUENCIES, SPECTRA, FourierRPE, GaussianFrequencies, GaussianSpectrum

H, T, R = 2, 3, 7
PTR = torch.tensor([0, 4, 4, 9])
PAIRS = [
    *((name, "gaussian") for name in sorted(SPECTRA.keys() - {"sum", "product"})),
    ("gaussian", "component"),
    ("directional", "component"),
    ("directional", "lebedev"),
    ("gaussian", "lattice"),
]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def build(spectrum="gaussian", frequencies="gaussian", split="one_sided", **settings):
    given = {"num_frequencies": R, "generator": seeded(1)}
    if frequencies in ("lattice", "lebedev"):
        given = {"radius": 5.0, "sigma": 3.0}
    if frequencies == "component":
        given |= {"num_heads": H, "num_terms": T}
    g = SPECTRA[spectrum](H, T, generator=seeded())
    return FourierRPE(g, FREQUENCIES[frequencies](**given, **settings), split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("spectrum", "frequencies"), PAIRS)
def test_the_product_is_the_sampled_mask(spectrum, frequencies, split):
    rpe = build(spectrum, frequencies, split)
    positions = draw(9, 3)
    features = rpe(positions, PTR)
    assert features.key.shape == (9, H, rpe.num_features)
    product = torch.einsum("ihc,jhc->ijh", features.query.expand(-1, H, -1), features.key)
    for start, stop in ((0, 4), (4, 9)):
        r = positions[start:stop]
        found = product[start:stop, start:stop]
        expected = rpe.sampled_mask(r[:, None] - r)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for vectors in (features.query, features.key):
        norms = vectors.norm(dim=-1)
        torch.testing.assert_close(norms, norms[:1].expand_as(norms))


def test_the_mask_by_hand():
    """(1/R) Σ Re ρ e^{2πiξ·x}: signs, the factor 2π and the quarter turn."""
    xi = torch.tensor([[0.1, 0.2], [-0.3, 0.05]], dtype=torch.float64)
    ratio = torch.tensor([[2.0 + 1.0j, -1.0 + 0.5j]], dtype=torch.complex128)
    positions = torch.tensor([[0.3, 1.0], [-0.7, 2.0], [1.0, 0.1]], dtype=torch.float64)
    for split in SPLITS:
        features = position_features(fourier_basis(positions, xi), ratio, split)
        found = features.query[:, 0] @ features.key[:, 0].T
        for i in range(3):
            for j in range(3):
                x = positions[i] - positions[j]
                waves = [
                    complex(rho) * math.e ** (2j * math.pi * float(k @ x))
                    for rho, k in zip(ratio[0], xi, strict=True)
                ]
                assert float(found[i, j]) == pytest.approx(sum(waves).real / 2, abs=1e-12)


def test_the_basis_and_its_quarter_turn():
    basis = fourier_basis(torch.tensor([[0.25], [0.125]]), torch.tensor([[1.0]]))
    expected = torch.tensor([[0.0, 1.0], [0.5**0.5, 0.5**0.5]])
    torch.testing.assert_close(basis, expected)
    turned = fourier_basis(torch.tensor([[0.0], [-0.125]]), torch.tensor([[1.0]]))
    torch.testing.assert_close(quarter_turn(basis), turned)


def test_masks_and_sampled_masks_of_deterministic_frequencies_are_one():
    spectrum = GaussianSpectrum(H, T, sigma_min=2.0, sigma_max=3.0, generator=seeded())
    rpe = FourierRPE(spectrum, FREQUENCIES["lattice"](radius=6.0, sigma=(2.0, 3.0)))
    x = torch.tensor([[0.0, 0, 0], [1.0, -2.0, 0.5], [3.0, 3.0, 3.0]])
    torch.testing.assert_close(rpe.sampled_mask(x), rpe.mask(x), rtol=0, atol=3e-3)


@pytest.mark.parametrize("origin", ["mean", "first", "points"])
def test_origins(origin):
    rpe, positions = build(), draw(9, 3)
    given = torch.tensor([[1.0, 2, 3], [0, 0, 0], [-1, 0, 0]]) if origin == "points" else origin
    features = rpe(positions, PTR, origin=given)
    starts = {
        "mean": torch.stack([positions[:4].mean(0), positions[4:].mean(0)]),
        "first": positions[[0, 4]],
        "points": torch.tensor([[1.0, 2, 3], [-1, 0, 0]]),
    }[origin]
    local = positions - starts.repeat_interleave(torch.tensor([4, 5]), 0)
    torch.testing.assert_close(
        features.basis, fourier_basis(local, rpe.frequencies(rpe.spectrum)[0])
    )


def test_far_away_positions_and_integers_lose_nothing():
    rpe = FourierRPE(GaussianSpectrum(H, T, 1), GaussianFrequencies(R, 1, generator=seeded()))
    tokens = torch.arange(9)[:, None]
    near = rpe(tokens.float(), PTR).basis
    assert near.dtype == torch.float32
    for origin in ("mean", "first"):
        expected = rpe(tokens.float(), PTR, origin=origin).basis
        far = rpe(tokens + 2**30, PTR, origin=origin).basis
        torch.testing.assert_close(far, expected)
        torch.testing.assert_close(rpe(tokens.half(), PTR, origin=origin).basis, expected)
    points = torch.full((3, 1), 2**30)
    far = rpe(tokens + 2**30, PTR, origin=points).basis
    torch.testing.assert_close(far, rpe(tokens, PTR, origin=0 * points).basis)


def test_precision_under_autocast():
    rpe, positions = build(), 20 * draw(9, 3)
    expected = rpe(positions, PTR)
    with torch.autocast("cpu", torch.bfloat16):
        found = rpe(positions, PTR)
    for a, b in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b)
    double = copy.deepcopy(rpe).double()(positions.double(), PTR)
    torch.testing.assert_close(found.basis, double.basis.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("split", SPLITS)
def test_splits_have_the_gradients_of_the_mask(split):
    """And none of NaN where a ratio is 0."""
    basis = fourier_basis(draw(5, 3), draw(R, 3, seed=1)).double()
    ratio = draw(H, R, seed=2).double()
    ratio[:, 0] *= 1e-3

    def product(basis, ratio):
        features = position_features(basis, ratio, split)
        return torch.einsum("ihc,jhc->ijh", features.query.expand(-1, H, -1), features.key)

    def plain(basis, ratio):
        c, s = basis.chunk(2, -1)
        waves = c[:, None] * c + s[:, None] * s
        return torch.einsum("ijr,hr->ijh", waves, ratio) / R

    u = draw(5, 5, H, seed=3).double()
    results = []
    for function in (product, plain):
        leaves = [x.clone().requires_grad_() for x in (basis, ratio)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad((u * out).sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    zero = torch.zeros(H, R, dtype=torch.float64, requires_grad=True)
    product(basis, zero).sum().backward()
    assert zero.grad.isfinite().all()


def test_one_sided_gradients_stay_bounded_where_the_paper_s_blow_up():
    slopes = {}
    for split in SPLITS:
        ratio = torch.tensor([[1.0, 1e-8]], requires_grad=True)
        features = position_features(torch.ones(1, 4), ratio, split)
        (features.query + 2 * features.key).sum().backward()
        slopes[split] = float(ratio.grad[0, 1].abs())
    assert slopes["symmetric"] > 1e3
    assert slopes["one_sided"] < 5
    assert slopes["balanced"] < 5


def test_rows_and_phases():
    rpe = build()
    features = rpe(draw(9, 3), PTR)
    index = torch.tensor([3, 0])
    torch.testing.assert_close(features.rows(index).key, features.key[index])
    assert isinstance(features, PositionFeatures)
    assert phases(draw(4, 6, 3), draw(H, R, 3)).shape == (4, 6, H, R)


def test_shallow():
    """Attention may run through so many functions only."""
    rpe, positions = build(), draw(9, 3)
    calls, files = [], set()

    def event(frame, kind, _):
        name = frame.f_code.co_filename
        ours = "flt_mol" in name and "/tests/" not in name and "<" not in frame.f_code.co_name
        if kind == "call" and ours:
            calls.append(frame.f_code.co_name)
            files.add(name)

    sys.setprofile(event)
    try:
        rpe(positions, PTR)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 30, calls
    assert len(files) <= 6, files


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: FourierRPE(GaussianFrequencies(4), GaussianSpectrum(H, T)), "order"),
        (lambda: FourierRPE(GaussianSpectrum(H, T, 2), GaussianFrequencies(4)), "dimensions"),
        (lambda: build(split="even"), "even"),
        (lambda: build("matern", "component"), "MaternSpectrum"),
        (lambda: build()(draw(9, 2)), "positions"),
        (lambda: build()(draw(9, 3), PTR, origin="last"), "last"),
        (lambda: build()(draw(9, 3), PTR, origin=draw(2, 3)), "origin"),
        (lambda: position_features(draw(5, 4), draw(H, 3)), "basis"),
        (lambda: position_features(draw(5, 3, 6), draw(H, 3)), "basis"),
    ],
)
def test_what_is_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()
