import pytest
import torch
from periodic import F64, batch, rotation, seeded, supercell

from flt_mol.functional import UnfitSystemError
from flt_mol.nn import SpectralFilter

C, H = 6, 2
ROUTES = pytest.mark.parametrize("kernels_below", [0, 10**6], ids=["factors", "kernels"])
SYSTEMS = {
    "bulk": ([[7.0, 0.4, 0], [1.5, 6.0, 0.3], [-0.8, 0.5, 8.0]], [True] * 3),
    "slab": ([[7.0, 0.4, 0], [1.5, 6.0, 0], [0, 0, 60.0]], [True] * 3),
    "open slab": ([[7.0, 0.4, 0], [1.5, 6.0, 0], [0, 0, 0]], [True, True, False]),
    "wire": ([[7.0, 0.4, 0], [0, 0, 0], [0, 0, 0]], [True, False, False]),
    "molecule": ([[0.0] * 3] * 3, [False] * 3),
}


def layer(kernels_below=None, **settings):
    given = {"k_max": 0.6, "sigma_max": 1.5, "num_basis": 4, **settings}
    made = SpectralFilter(C, H, generator=seeded(2), **given)
    if kernels_below is not None:
        made.kernels_below = kernels_below
    return made.double()


def system(name, count=7):
    cell, pbc = SYSTEMS[name]
    positions = torch.rand(count, 3, generator=seeded(1), dtype=F64)
    x = torch.randn(count, C, generator=seeded(5), dtype=F64)
    shape = torch.tensor([7.0, 6.0, 4.0], dtype=F64)
    return x, positions * shape, torch.tensor(cell, dtype=F64), torch.tensor(pbc)


def apply(module, x, positions, cell, pbc):
    ptr = torch.tensor([0, len(positions)])
    return module(x, module.geometry(positions, cell[None], pbc[None], ptr))


def explicit(module, x, positions, cell, pbc):
    """Σ_j Σ_T f_h(r_i − r_j − T) v_jh over all images within 9 σ_max, in space alone."""
    ranges = [
        range(-3, 4) if on and row.norm() < 30 else range(1)
        for on, row in zip(pbc, cell, strict=True)
    ]
    steps = torch.cartesian_prod(*[torch.tensor(list(r), dtype=F64) for r in ranges])
    r = positions[:, None, None] - positions[None, :, None] - steps @ cell
    matrix = module.filter(r).sum(2)
    value = module.value(x).view(len(x), H, -1)
    return module.out(torch.einsum("ijh,jhd->ihd", matrix, value).flatten(1))


@ROUTES
@pytest.mark.parametrize("name", SYSTEMS)
def test_values_and_forces_are_those_of_a_sum_over_images_in_space(name, kernels_below):
    module, (x, positions, cell, pbc) = layer(kernels_below, padding=7.5), system(name)
    positions.requires_grad_()
    found, expected = (f(module, x, positions, cell, pbc) for f in (apply, explicit))
    scale = (expected - module.out.bias).square().mean().sqrt()
    assert (found - expected).abs().max() < 2e-3 * scale
    forces, truth = (torch.autograd.grad(y.sin().sum(), positions)[0] for y in (found, expected))
    assert (forces - truth).abs().max() < 2e-3 * truth.abs().max()


@pytest.mark.parametrize("name", SYSTEMS)
def test_outputs_do_not_depend_on_how_a_system_is_written(name):
    module, (x, positions, cell, pbc) = layer(), system(name)
    expected, turn = apply(module, x, positions, cell, pbc), rotation(1)
    order = torch.randperm(7, generator=seeded())
    steps = (torch.randint(-4, 5, (7, 3), generator=seeded()) * pbc).double()
    change = torch.eye(3, dtype=F64)
    change[0, 1] = 2.0 * pbc[1]
    changes = {
        "rotation": (x, positions @ turn.T, cell @ turn.T),
        "mirror": (x, -positions, -cell),
        "translation": (x, positions + 1e3, cell),
        "lattice shifts": (x, positions + steps @ cell, cell),
        "basis": (x, positions, change @ cell),
    }
    for change_name, given in changes.items():
        found = apply(module, *given, pbc)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=change_name)
    found = apply(module, x[order], positions[order], cell, pbc)
    torch.testing.assert_close(found, expected[order], rtol=0, atol=1e-10)


@ROUTES
@pytest.mark.parametrize("times", [(2, 1, 1), (1, 2, 3)])
@pytest.mark.parametrize(("dtype", "error"), [(F64, 1e-10), (torch.float32, 2e-5)])
def test_supercells_give_the_same(kernels_below, times, dtype, error):
    module, (x, positions, cell, pbc) = layer(kernels_below).to(dtype), system("bulk")
    positions, ptr = positions.to(dtype), torch.tensor([0, 7])
    expected = apply(module, x.to(dtype), positions, cell.to(dtype), pbc)
    tiled, large, ptr = supercell(positions, cell[None].to(dtype), times)
    geometry = module.geometry(tiled, large, pbc[None], ptr)
    found = module(x.to(dtype).repeat(len(tiled) // 7, 1), geometry)
    torch.testing.assert_close(found, expected.repeat(len(tiled) // 7, 1), rtol=0, atol=error)


def test_systems_of_a_batch_do_not_meet_whichever_route_and_group():
    positions, cell, pbc, ptr = batch((5, 0, 1, 6, 2))
    x = torch.randn(14, C, generator=seeded(), dtype=F64)
    for kernels_below in (0, 2, 10**6):
        module = layer(kernels_below)
        together = module(x, module.geometry(positions, cell, pbc, ptr))
        for b in (0, 2, 3, 4):
            rows = slice(int(ptr[b]), int(ptr[b + 1]))
            alone = apply(module, x[rows], positions[rows], cell[b], pbc[b])
            torch.testing.assert_close(together[rows], alone, rtol=0, atol=1e-10)


def test_routes_agree_in_gradients_of_forces():
    results = []
    for kernels_below in (0, 10**6):
        module, (x, positions, cell, pbc) = layer(kernels_below), system("bulk")
        positions.requires_grad_()
        out = apply(module, x, positions, cell, pbc)
        (force,) = torch.autograd.grad(out.sin().sum(), positions, create_graph=True)
        wanted = (positions, module.amplitudes, module.value.weight)
        results.append(torch.autograd.grad(out.sum() + force.square().sum(), wanted))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("dtype", "limit"), [(F64, 1e-6), (torch.float32, 5e-6)])
def test_a_mesh_gives_the_same_with_gradients(monkeypatch, dtype, limit):
    positions, cell, pbc, ptr = (x.to(dtype) if x.is_floating_point() else x for x in batch())
    module, x = layer().to(dtype), torch.randn(12, C, generator=seeded(), dtype=dtype)
    results = []
    for most in (float("inf"), 300.0, 0.0):  # waves, some of each, meshes
        monkeypatch.setattr("flt_mol.nn.spectral_filter.MAX_PRODUCTS", most)
        wanted = positions.clone().requires_grad_(), cell.clone().requires_grad_()
        geometry = module.geometry(*wanted, pbc, ptr)
        out = module(x, geometry)
        gradients = torch.autograd.grad(out.sin().sum(), (module.amplitudes, *wanted))
        results.append((len(geometry.meshes), out, *gradients))
    assert [count for count, *_ in results] == [0, 1, 3]
    for _, *found in results[1:]:
        for one, other, scale in zip(found, results[0][1:], (1, 1, 20, 20), strict=True):
            assert (one - other).norm() < scale * limit * other.norm()


def test_the_spectrum_is_the_transform_of_the_filter():
    module = layer().requires_grad_(False)
    r = torch.linspace(0, 30, 6001, dtype=F64)
    f = module.filter(torch.stack([r, 0 * r, 0 * r], -1))
    for k in (0.0, 0.1, 0.37):
        shells = torch.sinc(2 * k * r) * 4 * torch.pi * r**2
        g = torch.trapezoid(shells[:, None] * f, r, dim=0)
        expected = module.spectrum(torch.tensor([k], dtype=F64))[0]
        torch.testing.assert_close(g, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


def test_initial_outputs_have_unit_size():
    positions = torch.rand(400, 3, generator=seeded()) * 20
    module = SpectralFilter(64, 64, generator=seeded())
    ptr, on = torch.tensor([0, 400]), torch.ones(1, 3, dtype=torch.bool)
    geometry = module.geometry(positions, 20 * torch.eye(3)[None], on, ptr)
    value = torch.randn(400, 64, 1, generator=seeded())
    assert 0.3 < module.convolve(value, geometry).std() < 3


def test_weights_and_their_names():
    names = {"amplitudes", "value.weight", "value.bias", "out.weight", "out.bias"}
    assert set(layer().state_dict()) == names
    assert layer().amplitudes.shape == (H, 4)
    one, other = (SpectralFilter(C, H, generator=seeded(3)).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in names)


def test_autocast_does_not_reach_the_sums():
    module, (x, positions, cell, pbc) = layer().float(), system("bulk")
    x, ptr = x.float(), torch.tensor([0, 7])
    geometry = module.geometry(positions.float(), cell[None].float(), pbc[None], ptr)
    value = x.view(7, H, -1)
    exact = module.convolve(value, geometry)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module.convolve(value, geometry), exact)


def test_what_does_not_fit():
    for wrong in (
        {"num_heads": 4},
        {"num_heads": 0},
        {"num_basis": 0},
        {"k_max": 0.1},
        {"sigma_max": -1.0},
        {"k_max": float("inf")},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SpectralFilter(**{"embed_dim": 6, "num_heads": 2, **wrong})
    module, (x, positions, cell, pbc) = layer(), system("bulk")
    geometry = module.geometry(positions, cell[None], pbc[None], torch.tensor([0, 7]))
    for rows in (x[:-1], x[:, :-1]):
        with pytest.raises(ValueError, match="x has shape|number of rows"):
            module(rows, geometry)
    for other in ({"k_max": 0.5}, {"padding": 1.0}):
        with pytest.raises(ValueError, match="k_max, sigma_max, num_basis, padding"):
            layer(**other)(x, geometry)
    with pytest.raises(UnfitSystemError, match="singular"):
        apply(module, x, positions, 0 * cell, pbc)
