import math

import pytest
import torch
from scipy.spatial.transform import Rotation

from flt_mol.nn.spectral_filter import SpectralFilter

F64 = torch.float64
C, H = 8, 2
TRICLINIC = torch.tensor([[7.6, 0, 0], [3.8, 6.6, 0], [0.7, 0.2, 9.0]], dtype=F64)
SLAB = torch.tensor([[7.6, 0, 0], [3.8, 6.6, 0], [0.7, 0.2, 30.0]], dtype=F64)
ROUTES = pytest.mark.parametrize("kernels_below", [0, 10**6])


def layer(kernels_below=0, dtype=F64, **options):
    generator = torch.Generator().manual_seed(0)
    options = {"embed_dim": C, "num_heads": H, **options}
    return SpectralFilter(**options, kernels_below=kernels_below, generator=generator).to(dtype)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def atoms(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, generator=generator, dtype=F64) * torch.tensor(size, dtype=F64)


def rotation(seed):
    return torch.tensor(Rotation.random(random_state=seed).as_matrix())


def apply(module, x, positions, cell, pbc=(True, True, True)):
    """Output for a single system."""
    dtype = module.amplitudes.dtype
    geometry = module.geometry(
        positions.to(dtype),
        cell[None].to(dtype),
        torch.tensor([list(pbc)]),
        torch.tensor([0, len(positions)]),
    )
    return module(x.to(dtype), geometry)


SYSTEMS = {
    "bulk": (atoms(20, [9.0, 9.0, 9.0]), TRICLINIC, (True, True, True)),
    "slab": (atoms(20, [7.0, 7.0, 8.0]), SLAB, (True, True, True)),
    "slab, open above": (atoms(20, [7.0, 7.0, 8.0]), SLAB, (True, True, False)),
    "wire": (atoms(20, [7.0, 7.0, 8.0]), SLAB, (True, False, False)),
    "molecule": (atoms(20, [7.0, 6.0, 8.0]), 0 * SLAB, (False, False, False)),
}
EACH = pytest.mark.parametrize("name", SYSTEMS)


def explicit(module, x, positions, cell, pbc):
    """Sum over images in real space, with the filter of open space."""
    counts = [6 if p else 0 for p in pbc]
    steps = [torch.arange(-n, n + 1, dtype=F64) for n in counts]
    images = torch.cartesian_prod(*steps) @ cell
    displacements = (positions[:, None] - positions[None])[:, :, None] + images
    near = displacements.norm(dim=-1) < 8 * module.sigma_max
    matrix = torch.zeros(*near.shape, module.num_heads, dtype=F64)
    matrix = matrix.index_put((near,), module.filter(displacements[near])).sum(2)
    value = module.value(x).view(len(x), module.num_heads, -1)
    return module.out(torch.einsum("ijh,jhd->ihd", matrix, value).reshape(x.shape))


@EACH
@ROUTES
@pytest.mark.parametrize(("pad", "error"), [(4.0, 6e-4), (5.0, 4e-4)])
def test_values_and_forces_are_those_of_a_sum_over_images(name, kernels_below, pad, error):
    positions, cell, pbc = SYSTEMS[name]
    module, x = layer(kernels_below, sigma_max=2.0, padding=2 * pad), draw(20, C)
    positions = positions.clone().requires_grad_()
    found = apply(module, x, positions, cell, pbc)
    expected = explicit(module, x, positions, cell, pbc)
    scale = expected.square().mean().sqrt()
    assert (found - expected).abs().max() < error * scale
    forces, truth = (torch.autograd.grad(y.sin().sum(), positions)[0] for y in (found, expected))
    assert (forces - truth).abs().max() < error * truth.abs().max()


@EACH
def test_both_routes_give_the_same_numbers_and_gradients(name):
    positions, cell, pbc = SYSTEMS[name]
    results = []
    for kernels_below in (0, 10**6):
        module, x = layer(kernels_below), draw(20, C).requires_grad_()
        where = positions.clone().requires_grad_()
        out = apply(module, x, where, cell, pbc)
        wanted = (x, where, module.amplitudes, module.value.weight)
        (force,) = torch.autograd.grad(out.sin().sum(), where, create_graph=True)
        results.append((out, *torch.autograd.grad(out.sum() + force.square().sum(), wanted)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@EACH
@ROUTES
def test_translation_and_permutation(name, kernels_below):
    positions, cell, pbc = SYSTEMS[name]
    module, x = layer(kernels_below), draw(20, C)
    out = apply(module, x, positions, cell, pbc)
    moved = apply(module, x, positions + torch.tensor([0.3, -7.7, 31.0]), cell, pbc)
    torch.testing.assert_close(moved, out, rtol=0, atol=1e-10)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    mixed = apply(module, x[order], positions[order], cell, pbc)
    torch.testing.assert_close(mixed, out[order], rtol=0, atol=1e-10)


@EACH
@ROUTES
def test_rotation_of_everything_is_exact(name, kernels_below):
    positions, cell, pbc = SYSTEMS[name]  # the molecule has three different moments
    module, x, turn = layer(kernels_below), draw(20, C), rotation(1)
    still = apply(module, x, positions, cell, pbc)
    turned = apply(module, x, positions @ turn.T, cell @ turn.T, pbc)
    torch.testing.assert_close(turned, still, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("pad", "error"), [(4.0, 6e-4), (5.0, 3e-4)])
def test_rotation_error_of_a_molecule_without_principal_axes_is_the_stated_one(pad, error):
    cube = torch.cartesian_prod(*[torch.arange(3, dtype=F64) * 2.5] * 3)
    module, x = layer(padding=3 * pad), draw(27, C)
    turned = [
        apply(module, x, cube @ rotation(seed).T, torch.zeros(3, 3), [False] * 3)
        for seed in range(5)
    ]
    scale = turned[0].square().mean().sqrt()
    worst = max((y - turned[0]).abs().max() / scale for y in turned)
    assert 1e-6 < worst < error


@pytest.mark.parametrize("name", ["bulk", "slab"])
@ROUTES
def test_lattice_shifts_and_other_bases_and_hands(name, kernels_below):
    positions, cell, pbc = SYSTEMS[name]
    module, x = layer(kernels_below), draw(20, C)
    out = apply(module, x, positions, cell, pbc)
    shifts = torch.randint(-3, 4, (20, 3), generator=torch.Generator().manual_seed(1)).double()
    moved = apply(module, x, positions + shifts @ cell, cell, pbc)
    torch.testing.assert_close(moved, out, rtol=0, atol=1e-10)
    for change in (
        [[1, 1, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 0, 1], [0, 1, 0], [0, 0, 1]],
        [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 0, -1]],
    ):
        other = torch.tensor(change, dtype=F64) @ cell
        same = apply(module, x, positions, other, pbc)
        torch.testing.assert_close(same, out, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["bulk", "slab"])
@pytest.mark.parametrize("times", [(2, 2, 1), (2, 2, 2), (1, 3, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-5)])
@ROUTES
def test_supercells(name, times, dtype, tolerance, kernels_below):
    positions, cell, pbc = SYSTEMS[name]
    # With vacuum in between, two slabs are no longer one with a vacuum: the same, but not exactly.
    shrink = not (name == "slab" and times[2] > 1)
    module = layer(kernels_below, dtype, shrink_vacuum=shrink)
    x = draw(20, C)
    images = torch.cartesian_prod(*(torch.arange(n, dtype=F64) for n in times)) @ cell
    copies = len(images)
    large = (images[:, None] + positions).reshape(-1, 3)
    out = apply(module, x, positions, cell, pbc)
    super_cell = torch.diag(torch.tensor(times, dtype=F64)) @ cell
    repeated = apply(module, x.repeat(copies, 1), large, super_cell, pbc)
    assert out.abs().max() > 0.5
    torch.testing.assert_close(repeated, out.repeat(copies, 1), rtol=0, atol=tolerance)


@ROUTES
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_a_batch_of_very_different_systems_is_each_alone(kernels_below, dtype, tolerance):
    chosen = [SYSTEMS[name] for name in SYSTEMS]
    chosen.insert(1, (atoms(0, [1.0] * 3), 0 * SLAB, (True, True, True)))
    chosen.append((atoms(1, [1.0] * 3), 0 * SLAB, (False, False, False)))
    chosen.append((atoms(3, [1.0] * 3), 3 * torch.eye(3, dtype=F64), (True, True, True)))
    sizes = [len(positions) for positions, _, _ in chosen]
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    module, x = layer(kernels_below, dtype), draw(int(ptr[-1]), C).to(dtype)
    positions, cells = (torch.cat([s[0] for s in chosen]), torch.stack([s[1] for s in chosen]))
    flags = torch.tensor([s[2] for s in chosen])
    batch = module(x, module.geometry(positions.to(dtype), cells.to(dtype), flags, ptr))
    assert batch.isfinite().all()
    for b, system in enumerate(chosen):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        alone = apply(module, x[rows], *system)
        torch.testing.assert_close(batch[rows], alone, rtol=0, atol=tolerance)


def test_small_and_large_systems_of_a_batch_go_different_ways():
    sizes = [20, 3, 9]
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    positions = torch.cat([atoms(n, [7.0] * 3, n) for n in sizes])
    cells, pbc = TRICLINIC.expand(3, 3, 3), torch.ones(3, 3, dtype=torch.bool)
    x = draw(32, C)
    outs = []
    for kernels_below in (0, 9, 100):
        module = layer(kernels_below)
        geometry = module.geometry(positions, cells, pbc, ptr)
        outs.append(module(x, geometry))
        assert (geometry.waves.numel() > 0) == (kernels_below < 20)
        assert geometry.kernels.shape[1] == sum(n * n for n in sizes if n <= kernels_below)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(outs[2], outs[0], rtol=0, atol=1e-12)


@ROUTES
@pytest.mark.parametrize("ptr", [[0], [0, 0, 0]])
def test_no_atoms(kernels_below, ptr):
    b = len(ptr) - 1
    module = layer(kernels_below)
    geometry = module.geometry(
        torch.zeros(0, 3, dtype=F64), torch.zeros(b, 3, 3, dtype=F64),
        torch.zeros(b, 3, dtype=torch.bool), torch.tensor(ptr),
    )  # fmt: skip
    out = module(torch.zeros(0, C, dtype=F64), geometry)
    assert out.shape == (0, C)
    out.sum().backward()


def test_a_single_atom_sees_itself():
    module = layer()
    x = draw(1, C)
    out = apply(module, x, torch.zeros(1, 3, dtype=F64), torch.zeros(3, 3), [False] * 3)
    itself = module.filter(torch.zeros(1, 3, dtype=F64))[0]
    value = module.value(x).view(1, H, -1) * itself[None, :, None]
    torch.testing.assert_close(out, module.out(value.reshape(1, C)), rtol=0, atol=2e-3)


def test_the_filter_is_the_transform_of_the_spectrum():
    module = layer(sigma_max=2.5)
    k = (torch.arange(20000, dtype=F64) + 0.5) * 0.45 / 20000
    spectrum = module.spectrum(k)
    for r in (0.0, 1.7, 6.3, 40.0):
        shells = 4 * math.pi * k**2 * torch.sinc(2 * k * r) * 0.45 / 20000
        expected = shells @ spectrum
        direction = torch.tensor([[0.6, 0.0, 0.8]], dtype=F64)
        torch.testing.assert_close(module.filter(r * direction)[0], expected, rtol=0, atol=1e-8)


def test_a_new_layer_gives_outputs_of_unit_size():
    # Values of unit variance, independent or all alike, in a bulk of a metal's density.
    positions, cell = atoms(150, [14.0] * 3), 14.0 * torch.eye(3, dtype=F64)
    ptr, pbc = torch.tensor([0, 150]), torch.ones(1, 3, dtype=torch.bool)
    sizes = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        module = SpectralFilter(32, 16, generator=generator).double()
        geometry = module.geometry(positions, cell[None], pbc, ptr)
        values = torch.cat([draw(150, 16, 2, seed=seed), torch.ones(150, 16, 2, dtype=F64)], -1)
        out = module.convolve(values, geometry).detach()
        sizes.append([out[..., :2].square().mean(), out[..., 2:].square().mean()])
    independent, alike = torch.tensor(sizes).mean(0).sqrt().tolist()
    assert 0.4 < independent < 1.5
    assert 0.3 < alike < 1.5
    silent = layer(init_scale=0.0)
    out = apply(silent, draw(20, C), *SYSTEMS["bulk"][:2])
    assert (out == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), silent.amplitudes)
    assert (gradient != 0).all()


@ROUTES
def test_far_away_in_float32(kernels_below):
    positions, cell, pbc = SYSTEMS["slab"]
    positions = (positions * 64).round() / 64  # exact in float32 even at 2^14 Å
    exact = apply(layer(kernels_below), draw(20, C), positions, cell, pbc)
    module = layer(kernels_below, torch.float32)
    for shift in (0.0, 2.0**14):
        found = apply(module, draw(20, C), positions + shift, cell, pbc)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@ROUTES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(kernels_below, dtype):
    positions, cell, pbc = SYSTEMS["slab"]
    module, x = layer(kernels_below, torch.float32), draw(20, C).float()
    value = draw(20, H, C // H).float()

    def geometry():
        return module.geometry(
            positions.float(), cell.float()[None], torch.tensor([pbc]), torch.tensor([0, 20])
        )

    plain, exact = module.convolve(value, geometry()), module(x, geometry())
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(module.convolve(value, geometry()), plain)
        out = module(x, geometry())
        assert out.dtype == dtype
        out.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    # The two linear maps round to 8 or 11 bits, nothing else does.
    assert (out - exact).abs().max() < 0.03 * exact.abs().max()


# torch looks at .grad of the geometry, which is not a leaf, while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ROUTES
def test_compiled_without_graph_breaks(kernels_below):
    module = layer(kernels_below)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, geometry):
        return module(x, geometry)

    for name, shift in (("slab", 0.0), ("bulk", 0.1), ("molecule", 0.2)):
        positions, cell, pbc = SYSTEMS[name]
        results = []
        for run in (module, compiled):
            where = (positions + shift * draw(20, 3)).requires_grad_()
            x = draw(20, C).requires_grad_()
            geometry = module.geometry(
                where, cell[None], torch.tensor([pbc]), torch.tensor([0, 20])
            )
            out = run(x, geometry)
            wanted = (x, where, *module.parameters())
            results.append((out, *torch.autograd.grad(out.sin().sum(), wanted)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_exported_programs_take_other_systems():
    module = layer(10).eval()

    def inputs(names):
        systems = [SYSTEMS[name] for name in names]
        systems.append((atoms(9, [8.0] * 3), TRICLINIC, (True, True, True)))
        ptr = torch.tensor([0, *(len(s[0]) for s in systems)]).cumsum(0)
        geometry = module.geometry(
            torch.cat([s[0] for s in systems]), torch.stack([s[1] for s in systems]),
            torch.tensor([s[2] for s in systems]), ptr,
        )  # fmt: skip
        return draw(int(ptr[-1]), C), geometry

    dynamic = torch.export.Dim.DYNAMIC
    x, geometry = inputs(["slab", "bulk"])
    shapes = type(geometry)(
        ptr={0: dynamic}, waves={1: dynamic}, wave_layout={1: dynamic}, spectra={0: dynamic},
        kernels={1: dynamic}, kernel_layout={1: dynamic}, settings={},
    )  # fmt: skip
    program = torch.export.export(
        module, (x, geometry), dynamic_shapes={"x": {0: dynamic}, "geometry": shapes}
    )
    x, geometry = inputs(["molecule", "wire", "bulk"])
    torch.testing.assert_close(program.module()(x, geometry), module(x, geometry))


@ROUTES
def test_derivatives_with_respect_to_the_cell(kernels_below):
    # A strain of a periodic system: positions and cell together.
    positions, cell, pbc = SYSTEMS["bulk"]
    module, x = layer(kernels_below, k_max=0.4), draw(20, C)

    def energy(strain):
        deformed = torch.eye(3, dtype=F64) + strain
        return apply(module, x, positions @ deformed, cell @ deformed, pbc).sin().sum()

    strain = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(energy, strain)
    slab = SYSTEMS["slab"]

    def slab_energy(strain):
        deformed = torch.eye(3, dtype=F64) + strain
        return apply(module, x, slab[0] @ deformed, slab[1] @ deformed, slab[2]).sin().sum()

    (found,) = torch.autograd.grad(slab_energy(strain), strain)
    step = 1e-5 * torch.eye(9, dtype=F64).view(9, 3, 3)
    true = torch.stack([(slab_energy(s) - slab_energy(-s)) / 2e-5 for s in step]).view(3, 3)
    assert (found - true).abs().max() < 3e-3 * true.abs().max()  # vacuum: what lies in the tail


def test_coincident_atoms_have_finite_gradients():
    module = layer()
    positions = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    apply(module, draw(3, C), positions, TRICLINIC).sum().backward()
    assert positions.grad.isfinite().all()


def test_a_geometry_serves_all_layers_with_its_basis_and_no_other():
    positions, cell, pbc = SYSTEMS["slab"]
    one, other = layer(10**6, embed_dim=32, num_heads=32), layer(0)
    arguments = (positions, cell[None], torch.tensor([pbc]), torch.tensor([0, 20]))
    x = draw(20, C)
    torch.testing.assert_close(
        other(x, one.geometry(*arguments)), other(x, other.geometry(*arguments))
    )
    for changed in ({"k_max": 0.4}, {"sigma_max": 2.5}, {"num_basis": 6}):
        with pytest.raises(ValueError, match="the geometry was made for"):
            other(x, layer(**changed).geometry(*arguments))


def test_one_filter_per_channel():
    positions, cell, pbc = SYSTEMS["bulk"]
    outs = [apply(layer(k, num_heads=C), draw(20, C), positions, cell, pbc) for k in (0, 99)]
    torch.testing.assert_close(*outs)
    module = layer(num_heads=C, sigma_max=2.0)
    found = apply(module, draw(20, C), positions, cell, pbc)
    images = explicit(module, draw(20, C), positions, cell, pbc)
    torch.testing.assert_close(found, images, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "not a multiple"),
        ({"num_heads": 0}, "not a multiple"),
        ({"num_basis": 0}, "num_basis"),
        ({"k_max": 0.05}, "k_max must be at least"),
        ({"sigma_max": 0.0}, "k_max must be at least"),
        ({"k_max": math.inf}, "must be finite"),
        ({"sigma_max": math.inf}, "must be finite"),
        ({"padding": -3.0}, "padding is -3.0"),
        ({"padding": 0.0}, "padding is 0.0"),
        ({"max_vectors": 0}, "max_vectors is 0"),
        ({"kernels_below": -5}, "kernels_below is -5"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SpectralFilter(**{"embed_dim": C, "num_heads": H, **options})


def test_rows_that_do_not_fit_are_refused():
    module = layer()
    positions, cell, pbc = SYSTEMS["bulk"]
    geometry = module.geometry(positions, cell[None], torch.tensor([pbc]), torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="x has shape"):
        module(draw(20, C + 1), geometry)
    with pytest.raises(ValueError, match="geometry of 20 atoms"):
        module(draw(21, C), geometry)
    with pytest.raises(ValueError, match="singular"):
        apply(module, draw(20, C), positions, torch.zeros(3, 3, dtype=F64), pbc)


@pytest.mark.parametrize("assign", [False, True])
def test_built_without_storage_and_loaded_it_is_the_same_layer(assign):
    module = layer(dtype=torch.float32)
    with torch.device("meta"):
        other = SpectralFilter(C, H, kernels_below=0)
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(module.state_dict(), assign=assign)
    positions, cell, pbc = SYSTEMS["bulk"]
    x = draw(20, C).float()
    assert torch.equal(*(apply(m, x, positions, cell, pbc) for m in (module, other)))


def test_the_filter_decays_as_its_docstring_says():
    bounds = {3: 1.5e-2, 4: 6e-4, 5: 2e-5, 6: 1e-5, 10: 1.1e-6}
    module = layer(num_heads=8, sigma_max=3.0)
    with torch.no_grad():
        module.amplitudes.copy_(torch.eye(8))
    for sigmas, bound in bounds.items():
        r = 3.0 * sigmas + torch.linspace(0, 3, 200, dtype=F64)
        far = module.filter(torch.stack([r, 0 * r, 0 * r], -1)).abs().amax(0)
        relative = (far / module.filter(torch.zeros(1, 3, dtype=F64))[0].abs()).max()
        assert 0.3 * bound < relative < bound
    # A tail, not a Gaussian: exp(−6²/2) is 1.5e-8.
    r = torch.tensor([[18.0, 0.0, 0.0]], dtype=F64)
    tail = module.filter(r).abs() / module.filter(0 * r).abs()
    assert tail.max() > 1e-6


def test_weights_are_drawn_alike_whatever_the_default_dtype_and_saved():
    module = layer()
    torch.set_default_dtype(F64)
    try:
        other = layer()
    finally:
        torch.set_default_dtype(torch.float32)
    state = module.state_dict()
    assert set(state) == {"amplitudes", "value.weight", "value.bias", "out.weight", "out.bias"}
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-7)
    before = torch.get_rng_state()
    layer()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    one = SpectralFilter(C, H)
    torch.manual_seed(3)
    assert torch.equal(SpectralFilter(C, H).amplitudes, one.amplitudes)


def test_rows_of_another_dtype_are_refused_by_name():
    layer = SpectralFilter(8, 2)
    positions, ptr = torch.rand(4, 3, dtype=torch.float64), torch.tensor([0, 4])
    cell, pbc = 5 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool)
    geometry = layer.geometry(positions, cell, pbc, ptr)
    assert layer(torch.zeros(4, 8), geometry).shape == (4, 8)
    with pytest.raises(ValueError, match=r"x is torch.float64, the layer's weights are"):
        layer(torch.zeros(4, 8, dtype=torch.float64), geometry)
