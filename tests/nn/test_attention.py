import pytest
import torch

from flt_mol.functional import (
    softmax_attention,
)
from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
from helpers.kernels import kernel_attention
from helpers.masks import relative_mask

C, H = 12, 3
F64 = torch.float64
RAGGED = torch.tensor([0, 0, 1, 6, 6, 16, 20, 20])
MODES = ["linear", "exact"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_rpe(generator=None, **settings):
    generator = generator or seeded(1)
    return FourierRPE(
        GaussianSpectrum(H, 4, generator=generator),
        GaussianFrequencies(5, generator=generator),
        **settings,
    )


def make(mode="linear", *, rpe=True, seed=1, split="one_sided", **settings):
    generator = seeded(seed)
    layer = FLTAttention(
        C,
        H,
        **{"num_features": 24, **settings},
        rpe=make_rpe(generator, split=split) if rpe else None,
        mode=mode,
        generator=generator,
    )
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value, layer.out):
            if linear.bias is not None:
                linear.bias.normal_(std=0.3, generator=generator)
    return layer


def draw(rows, dtype=torch.float32, seed=0):
    generator = seeded(seed)
    x = torch.randn(rows, C, generator=generator, dtype=F64)
    positions = 3 * torch.randn(rows, 3, generator=generator, dtype=F64)
    return x.to(dtype), positions.to(dtype)


def written_out(layer, x, positions, ptr):
    """The layer by its definition: concatenated features, explicit N × N weights."""
    q, k, v = (f(x).view(len(x), H, -1) for f in (layer.query, layer.key, layer.value))
    q, k = q * q.shape[-1] ** -0.25, k * q.shape[-1] ** -0.25
    w = layer.feature_map.content_projection
    if layer.rpe is not None:
        at = layer.rpe(positions, ptr)
        q = torch.cat([at.query.expand(-1, H, -1), q], dim=-1)
        k = torch.cat([at.key, k], dim=-1)
        w = torch.cat([layer.feature_map.position_projection, w], dim=-1)
    if layer.mode == "exact":
        zero = torch.zeros_like(q[..., :1])
        mask = relative_mask(q, k)
        out = softmax_attention(zero, zero, v, ptr, mask)
    else:
        phi_q, phi_k = (
            (torch.einsum("nhd,hmd->nhm", y, w) - y.square().sum(-1, keepdim=True) / 2).exp()
            for y in (q, k)
        )
        out = kernel_attention(phi_q, phi_k, v, ptr)
    return layer.out(out.reshape(x.shape))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rpe", [True, False])
@pytest.mark.parametrize("split", ["one_sided", "symmetric"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 2e-5)])
def test_values_and_gradients_are_those_of_the_definition(mode, rpe, split, dtype, tolerance):
    layer = make(mode, rpe=rpe, split=split).to(dtype)
    x, positions = draw(20, dtype)
    inputs = [x.requires_grad_(), *([positions.requires_grad_()] if rpe else [])]
    inputs += list(layer.parameters())
    out = layer(x, positions if rpe else None, ptr=RAGGED)
    truth = written_out(layer, x, positions, RAGGED)
    torch.testing.assert_close(out, truth, rtol=0, atol=tolerance)
    seed = torch.randn(out.shape, generator=seeded(3), dtype=dtype)
    gradients = torch.autograd.grad(out, inputs, seed)
    expected = torch.autograd.grad(truth, inputs, seed)
    for gradient, true in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, true, rtol=10 * tolerance, atol=20 * tolerance)


def test_exact_mode_is_softmax_attention_with_the_sampled_mask_as_bias():
    layer = make("exact").double()
    x, positions = draw(9, F64)
    ptr = torch.tensor([0, 4, 9])
    bias = layer.rpe.sampled_mask(positions[:, None] - positions[None]).permute(2, 0, 1)
    q, k, v = (f(x).view(9, H, -1) for f in (layer.query, layer.key, layer.value))
    expected = layer.out(softmax_attention(q, k, v, ptr, bias).reshape(9, C))
    torch.testing.assert_close(layer(x, positions, ptr=ptr), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_linear_tends_to_exact_as_features_grow(orthogonal):
    x, positions = draw(20)

    def error(num_features):
        total = 0.0
        for seed in range(4):
            layer = make(num_features=num_features, seed=seed, orthogonal=orthogonal)
            with torch.no_grad():  # small logits, where features' errors are those of a mean
                layer.rpe.spectrum.amplitude *= 0.25
                layer.query.weight *= 0.5
                layer.key.weight *= 0.5
            linear = layer(x, positions, ptr=RAGGED)
            layer.mode = "exact"
            total += (linear - layer(x, positions, ptr=RAGGED)).square().mean().item()
        return total**0.5

    # 64 times the features: an eighth of the error in theory.
    errors = [error(m) for m in (64, 4096)]
    assert errors[0] > 0.01
    assert errors[1] < errors[0] / 5


def test_the_two_modes_share_their_state():
    linear, exact = make("linear", seed=1), make("exact", seed=2)
    x, positions = draw(20)
    exact.load_state_dict(linear.state_dict())
    linear.mode = "exact"
    assert torch.equal(linear(x, positions, ptr=RAGGED), exact(x, positions, ptr=RAGGED))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_its_systems_alone(mode):
    layer = make(mode)
    x, positions = draw(20)
    batch = layer(x, positions, ptr=RAGGED)
    for a, b in zip(RAGGED[:-1].tolist(), RAGGED[1:].tolist(), strict=True):
        alone = layer(x[a:b], positions[a:b])
        torch.testing.assert_close(batch[a:b], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [50.0, 1e20, float("nan")])
def test_other_systems_leave_no_trace(mode, factor):
    layer = make(mode)
    x, positions = draw(20)
    rows = slice(6, 16)
    expected = layer(x, positions, ptr=RAGGED)[rows]
    x, positions = x.clone(), positions.clone()
    x[:6], x[16:], positions[16:] = factor * x[:6], factor * x[16:], factor * positions[16:]
    result = layer(x, positions, ptr=RAGGED)[rows]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_permuting_rows_permutes_the_output(mode):
    layer = make(mode)
    x, positions = draw(20)
    order = torch.randperm(20, generator=seeded(4))
    expected = layer(x, positions)[order]
    torch.testing.assert_close(layer(x[order], positions[order]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", [2.0**10, 2.0**17])
def test_moving_a_system_changes_nothing(mode, shift):
    # Multiples of 1/64 Å stay exact in float32 after a shift by 2^17 Å.
    layer = make(mode)
    x, positions = draw(20)
    positions = (positions * 64).round() / 64
    expected = layer(x, positions, ptr=RAGGED)
    positions[6:16] += torch.tensor([shift, -shift, 0.0])
    torch.testing.assert_close(layer(x, positions, ptr=RAGGED), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_positions_matter(mode):
    layer = make(mode)
    x, positions = draw(20)
    difference = layer(x, positions, ptr=RAGGED) - layer(x, 2 * positions, ptr=RAGGED)
    assert difference[6:].abs().max() > 0.05
    assert difference[:1].abs().max() < 1e-6  # a system of one atom has no distances


@pytest.mark.parametrize("mode", MODES)
def test_an_atom_alone_attends_to_itself(mode):
    layer = make(mode)
    x, positions = draw(1)
    torch.testing.assert_close(layer(100 * x, positions), layer.out(layer.value(100 * x)))


@pytest.mark.parametrize("mode", MODES)
def test_system_indices_in_any_order(mode):
    layer = make(mode)
    x, positions = draw(20)
    system = torch.repeat_interleave(torch.arange(7), RAGGED.diff())
    expected = layer(x, positions, ptr=RAGGED)
    assert torch.equal(layer(x, positions, system=system, num_systems=7), expected)
    order = torch.randperm(20, generator=seeded(4))
    mixed = layer(x[order], positions[order], system=system[order], num_systems=9)
    torch.testing.assert_close(mixed, expected[order], rtol=0, atol=1e-5)
    features = layer.rpe(positions, RAGGED).rows(order)
    given = layer(x[order], system=system[order], position_features=features)
    torch.testing.assert_close(given, expected[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ptr", [None, torch.tensor([0]), torch.tensor([0, 0, 0])])
def test_no_atoms(mode, ptr):
    layer = make(mode)
    out = layer(torch.zeros(0, C), torch.zeros(0, 3), ptr=ptr)
    assert out.shape == (0, C)
    out.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_features_shared_by_layers_are_the_ones_of_an_rpe_of_its_own(mode):
    own, rpe = make(mode), make_rpe(seeded(1))
    shared = FLTAttention(C, H, num_features=24, position_dim=rpe.num_features, mode=mode)
    state = {k: v for k, v in own.state_dict().items() if not k.startswith("rpe.")}
    shared.load_state_dict(state)  # so the layer holds nothing of the rpe
    x, positions = draw(20)
    features = own.rpe(positions, RAGGED)
    expected = own(x, positions, ptr=RAGGED)
    assert torch.equal(shared(x, ptr=RAGGED, position_features=features), expected)
    assert torch.equal(own(x, ptr=RAGGED, position_features=features), expected)


@pytest.mark.parametrize("scale", [30.0, 1e3])
@pytest.mark.parametrize("mode", MODES)
def test_large_features_stay_finite(mode, scale):
    layer = make(mode)
    x, positions = draw(20)
    x = (scale * x).requires_grad_()
    out = layer(x, positions, ptr=RAGGED)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))
    # An average of values never exceeds the largest of them.
    value = layer.value(x).abs().max() * layer.out.weight.abs().sum(-1).max()
    assert out.abs().max() <= value + layer.out.bias.abs().max()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", ["one_sided", "symmetric"])
def test_every_parameter_gets_a_gradient(mode, split):
    layer = make(mode, split=split).double()
    x, positions = draw(20, F64)
    layer(x, positions, ptr=RAGGED).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # A bias of keys shifts all logits of a query alike: exact attention cannot see it.
        invisible = mode == "exact" and name == "key.bias"
        assert (parameter.grad.abs().max() > 1e-9) != invisible, name


@pytest.mark.parametrize("mode", MODES)
def test_small_ratios_train_with_the_one_sided_split_only(mode):
    x, positions = draw(20, F64)

    def slope(split, size):
        layer = make(mode, split=split).double()
        ratio = torch.full((H, 5), size, dtype=F64, requires_grad=True)
        features = layer.rpe(positions, RAGGED)
        at = type(features)(*_with_ratio(features, ratio, split))
        layer(x, ptr=RAGGED, position_features=at).square().sum().backward()
        return ratio.grad.norm().item()

    assert 0.2 < slope("one_sided", 1e-8) / slope("one_sided", 1e-2) < 5
    if mode == "linear":  # exact attention sees the product ΦΨᵀ alone, whose slope is bounded
        assert slope("symmetric", 1e-8) > 30 * slope("symmetric", 1e-4)


def _with_ratio(features, ratio, split):
    from flt_mol.functional import position_features

    return position_features(features.basis.detach(), ratio, split)


@pytest.mark.parametrize("mode", MODES)
def test_forces_and_their_derivatives(mode):
    layer = make(mode, num_features=4).double()
    x, positions = draw(5, F64)
    ptr = torch.tensor([0, 2, 5])

    def energy(r):
        return layer(x, r, ptr=ptr)

    positions.requires_grad_()
    assert torch.autograd.gradcheck(energy, positions)
    assert torch.autograd.gradgradcheck(energy, positions)
    (force,) = torch.autograd.grad(energy(positions).sin().sum(), positions)
    totals = torch.stack([force[:2].sum(0), force[2:].sum(0)])
    assert force.abs().max() > 1e-3
    torch.testing.assert_close(totals, torch.zeros_like(totals), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_atoms_in_one_place_have_finite_gradients(mode):
    layer = make(mode)
    x, _ = draw(4)
    positions = torch.zeros(4, 3, requires_grad=True)
    layer(x, positions).square().sum().backward()
    assert positions.grad.isfinite().all()


def test_seeds_and_saving(tmp_path):
    state = torch.get_rng_state()
    first, again = make(seed=3), make(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    x, positions = draw(20)
    expected = first(x, positions, ptr=RAGGED)
    assert torch.equal(again(x, positions, ptr=RAGGED), expected)
    torch.save(first.state_dict(), tmp_path / "layer.pt")
    other = make(seed=4)
    assert not torch.equal(other(x, positions, ptr=RAGGED), expected)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x, positions, ptr=RAGGED), expected)
    assert torch.equal(other(x, positions, ptr=RAGGED), expected)


def test_the_global_seed_decides_where_no_generator_is_given():
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(FLTAttention(C, H, position_dim=4).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["query.weight"], states[2]["query.weight"])
    assert not torch.equal(
        states[0]["feature_map.content_projection"], states[2]["feature_map.content_projection"]
    )


def test_names_in_a_checkpoint():
    names = {n for n in make().state_dict() if not n.startswith("rpe.")}
    linears = {f"{n}.{p}" for n in ("query", "key", "value", "out") for p in ("weight", "bias")}
    assert names == linears | {
        "feature_map.content_projection",
        "feature_map.position_projection",
    }
    assert set(FLTAttention(C, H, bias=False).state_dict()) == {
        "query.weight",
        "key.weight",
        "value.weight",
        "out.weight",
        "feature_map.content_projection",
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_finite_and_close(mode, dtype):
    layer = make(mode)
    x, positions = draw(20)
    expected = layer(x, positions, ptr=RAGGED)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x, positions, ptr=RAGGED)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    # Only the four linear maps are rounded: 2^-8 each in bfloat16, relative to values of 1.
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_a_module_in_half_precision_works(mode):
    layer = make(mode).bfloat16()
    x, positions = draw(20)
    out = layer(x.bfloat16(), positions, ptr=RAGGED)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_float64_as_default_dtype(mode):
    torch.set_default_dtype(F64)
    try:
        layer = make(mode)
        assert all(p.dtype == F64 for p in layer.state_dict().values())
        x, positions = draw(20, F64)
        out = layer(x, positions, ptr=RAGGED)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == F64
    single = make(mode)(x.float(), positions.float(), ptr=RAGGED)
    torch.testing.assert_close(out.float(), single, rtol=0, atol=2e-5)  # the same random numbers


def test_dropout_acts_on_the_attended_values_in_training_only():
    layer = make(dropout=1.0)
    x, positions = draw(20)
    torch.testing.assert_close(layer(x, positions), layer.out.bias.expand(20, C))
    layer.eval()
    plain = make()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, positions), plain(x, positions))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embed_dim": 10}, "multiple of num_heads"),
        ({"num_heads": 0}, "multiple of num_heads"),
        ({"num_features": 0}, "num_features"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"position_dim": -1}, "position_dim"),
        ({"num_heads": 4, "rpe": make_rpe()}, "4"),
        ({"rpe": make_rpe(), "position_dim": 4}, "the rpe has 10"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FLTAttention(**{"embed_dim": C, "num_heads": H, **settings})


def test_inputs_that_do_not_fit_are_refused():
    layer, shared, blind = make(), FLTAttention(C, H, position_dim=10), make(rpe=False)
    x, positions = draw(20)
    features, ptr = layer.rpe(positions), torch.tensor([0, 20])
    system = torch.zeros(20, dtype=torch.int64)
    wrong = {
        "x has shape": lambda: layer(x[:, :5], positions),
        "expected .N, 12.": lambda: layer(x[None, None], positions),
        "positions are missing": lambda: layer(x),
        "positions have shape .19, 3., expected .20, 3.": lambda: layer(x, positions[1:]),
        "positions have shape": lambda: layer(x, positions[:, :2]),
        "position_features are missing": lambda: shared(x, positions),
        "position_features have": lambda: shared(x, position_features=features.rows(system[:3])),
        "built without positions": lambda: blind(x, positions),
        "go with ptr, or": lambda: layer(x, positions, ptr=ptr, system=system),
        "or system and": lambda: layer(x, positions, ptr=ptr, num_systems=1),
        "system has shape": lambda: layer(x, positions, system=system[1:]),
        "system holds indices": lambda: layer(x, positions, system=system + 3, num_systems=2),
        "ptr must": lambda: layer(x, positions, ptr=ptr - 1),
        "must be the number of rows|end at": lambda: layer(x, positions, ptr=torch.tensor([0, 9])),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    other_width = features._replace(basis=features.basis[:, :4])
    with pytest.raises(ValueError, match=r"expected \(20, 10\)"):
        shared(x, position_features=other_width)


def test_a_generator_on_another_device_is_refused():
    class Elsewhere:
        device = torch.device("cuda")

    with pytest.raises(ValueError, match="CPU"):
        FLTAttention(C, H, generator=Elsewhere())


@pytest.mark.parametrize("mode", ["linear", "exact"])
def test_float64_positions_beside_float32_rows(mode):
    layer = make(mode)
    x, positions = draw(6)
    out = layer(x, positions.double())
    assert out.dtype == torch.float32
    assert torch.allclose(out, layer(x, positions), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_auto_is_linear_from_exactly_exact_below_keys(causal):
    layer = FLTAttention(C, H, mode="auto", exact_below=4, causal=causal, num_features=8)
    x, ptr = torch.randn(12, C), torch.tensor([0, 3, 7, 12])  # 3, 4 and 5 keys
    out = layer(x, ptr=ptr)
    found = {}
    for mode in ("exact", "linear"):
        layer.mode = mode
        found[mode] = layer(x, ptr=ptr)
    torch.testing.assert_close(out[:3], found["exact"][:3])
    torch.testing.assert_close(out[3:], found["linear"][3:])
    assert not torch.allclose(found["exact"], found["linear"], atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_acts_on_attended_values_in_training_only(mode):
    layer = FLTAttention(C, H, mode=mode, dropout=0.5)
    plain = FLTAttention(C, H, mode=mode)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(200, C)
    kept = []
    layer.out.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    layer(x)
    assert 0.4 < float((kept[0] == 0).float().mean()) < 0.6
    torch.testing.assert_close(layer.eval()(x), plain(x))
    assert (kept[1] != 0).all()


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="system=batch"):
        FLTAttention(C, H)(torch.randn(3, C), batch=torch.zeros(3))
    with pytest.raises(TypeError, match="mask=~key_padding_mask"):
        FLTAttention(C, H)(torch.randn(1, 3, C), key_padding_mask=torch.zeros(1, 3))


@pytest.mark.parametrize("feature_map", ["softmax", "relu"])
def test_chunks_of_rows_give_the_same_attention(feature_map, monkeypatch):
    layer = FLTAttention(8, 2, feature_map=feature_map, num_features=4).double()
    x = 30 * torch.randn(23, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context = x.flip(0)[:11]
    ptr, key_ptr = torch.tensor([0, 0, 9, 10, 22, 23, 23]), torch.tensor([0, 2, 8, 8, 10, 11, 11])
    given = {"ptr": ptr, "context": context, "context_ptr": key_ptr}
    expected = layer(x, ptr=ptr), layer(x, **given)
    monkeypatch.setattr("flt_mol.nn.attention.MAX_FEATURES", 3 * 8)
    with torch.no_grad():
        found = layer(x, ptr=ptr), layer(x, **given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
