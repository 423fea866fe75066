import json
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import ALL_OUTPUTS, KINDS, SPECTRAL, all_outputs, small_model, small_pairs, small_rpe

from flt_mol import Structures
from flt_mol.models import EnergyConfig, EnergyModel, Normalizer, SpectralConfig
from flt_mol.models.checkpoint import load_model, save_checkpoint
from flt_mol.models.energy import CONFIG_KEY
from helpers import invariances as testing


def build(**changes):
    model = small_model(**changes)
    model.normalizer.fit(torch.tensor([-3.0, 1.0, 2.0]))
    return model


FEW = [
    *("rpe", "rpe, both filters", "performer", "spectral alone", "vectors alone", "both filters"),
    *("correction, pair types", "auto", "exact", "gaussian images", "centred images, pair types"),
    *("sum", "mean"),
]
KINDS = {name: KINDS[name] for name in (*FEW, "spectral", "pairs", "centred images")}
VARIANTS = {
    **{name: KINDS[name] for name in FEW},
    "weight form": {"rpe": small_rpe(form="weight")},
    "symmetric": {"rpe": small_rpe(split="symmetric")},
    "hyperbolic": {"feature_map": "hyperbolic"},
    "learned relu": {"feature_map": "learned_relu"},
    "softplus": {"feature_map": "softplus"},
    "elu": {"feature_map": "elu"},
    "recycles": {"recycles": 3},
    "features back": all_outputs(KINDS["both filters"], 3),
    "positions back": all_outputs(KINDS["both filters"], 3, "positions"),
    "positions back, images": all_outputs(KINDS["centred images, pair types"], 2, "positions"),
}
every_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
every_kind = pytest.mark.parametrize("changes", [KINDS[name] for name in FEW], ids=FEW)
SOME = ["rpe", "both filters", "correction, pair types", "gaussian images", "centred images"]
some_kinds = pytest.mark.parametrize("changes", [KINDS[name] for name in SOME], ids=SOME)

SHORT = [
    "rpe",
    "both filters",
    "gaussian images",
    "performer",
    "exact",
    "mean",
    "elu",
    "features back",
    "positions back",
]
some_variants = pytest.mark.parametrize("changes", [VARIANTS[n] for n in SHORT], ids=SHORT)


@pytest.fixture
def structures():
    return testing.random_structures(torch.Generator().manual_seed(1), natoms=(5, 1, 9, 14))


def loss_of(outputs, structures):
    """Something of every number that the model gives."""
    generator = torch.Generator().manual_seed(3)
    return sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs.values())


@every_variant
def test_every_parameter_learns(changes, structures):
    """Unused parameters would stop training on several devices.

    Everything is not zero either, but for biases of keys and of masks, which softmax divides out in
    exact attention.
    """
    model = build(**all_outputs(changes, 2, changes.get("feedback", "features")))
    loss_of(model(structures), structures).backward()
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not name.endswith(("attention.key.bias", "images.out.bias")):
            assert parameter.grad.abs().max() > 1e-9 * largest, name


@every_variant
def test_a_model_of_energies_alone_has_no_idle_parameters(changes, structures):
    model = build(**{**changes, "outputs": ["energy"], "feedback": "features"})
    model(structures)["energy"].square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_what_a_model_gives(structures):
    model = build(**all_outputs(KINDS["both filters"], 1))
    out = model(structures)
    assert list(out) == ["energy", "energy_initial", "displacement"]
    assert {x.dtype for x in out.values()} == {torch.float32}
    assert [tuple(x.shape) for x in out.values()] == [(4,), (4,), (29, 3)]
    out = build(**all_outputs(KINDS["both filters"], 3))(structures)
    shapes = {name: tuple(x.shape) for name, x in out.items()}
    assert shapes == {
        "energy": (4,),
        "energy_initial": (4,),
        "displacement": (29, 3),
        "energy_recycles": (3, 4),
        "energy_initial_recycles": (3, 4),
        "displacement_recycles": (3, 29, 3),
    }
    assert list(build()(structures)) == ["energy"]
    assert list(build(recycles=2)(structures)) == ["energy", "energy_recycles"]


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 0], [0, 1]])
def test_outputs_keep_their_names_in_any_order(order, structures):
    """The head's columns and the normalisers follow the names, not the places."""
    names = [ALL_OUTPUTS[k] for k in order]
    model = build(**{**KINDS["pairs"], "outputs": names})
    with torch.no_grad():
        last = model.head.atom_energy[-1]
        last.weight.zero_()
        energies = [name for name in names if name != "displacement"]
        last.bias.copy_(torch.tensor([{"energy": 1.0, "energy_initial": 2.0}[n] for n in energies]))
        if model.normalizer_initial is not None:
            model.normalizer_initial.fit(torch.tensor([9.0, 11.0]))
    out = model(structures)
    assert set(out) == set(names)
    weights = torch.tensor([0.1, 0.3, 1.0])[structures.tags]
    total = torch.zeros(4).index_add(0, structures.system, weights)
    torch.testing.assert_close(out["energy"], (14 / 3) ** 0.5 * total)
    if "energy_initial" in names:
        torch.testing.assert_close(out["energy_initial"], 10 + 2 * total)


def test_heads_that_are_not_listed_are_not_built():
    full = set(build(**{**KINDS["pairs"], "outputs": ALL_OUTPUTS}).state_dict())
    without = set(build(**{**KINDS["pairs"], "outputs": ["energy", "energy_initial"]}).state_dict())
    bare = set(build(**KINDS["pairs"]).state_dict())
    assert {key.split(".")[0] for key in full - without} == {"displacement_head"}
    assert {key.split(".")[0] for key in without - bare} == {"normalizer_initial"}
    assert bare < without < full
    for name, parts in {"rpe": ("encoder.rpe",), "both filters": ("geometry", "spectral")}.items():
        keys = build(**KINDS[name]).state_dict()
        blind = build(**KINDS["performer"]).state_dict()
        for part in parts:
            assert any(part in key for key in keys)
            assert not any(part in key for key in blind)


@every_kind
def test_pairs_that_come_with_the_structures(changes, structures):
    """Those of the model's cutoff are used; those of another are as if they were not there."""
    model = build(**changes).eval()
    with torch.no_grad():
        expected = model(structures)["energy"]
        if model.cutoff is None:
            assert torch.equal(model(structures.with_pairs(3.0))["energy"], expected)
            return
        carried = structures.with_pairs(model.cutoff)
        assert torch.equal(model(carried)["energy"], expected)
        with_others = structures.with_pairs(model.cutoff - 1.5)
        assert torch.equal(model(with_others)["energy"], expected)
        few = replace(with_others, cutoff=model.cutoff)
        assert not torch.equal(model(few)["energy"], expected)


def test_pairs_are_made_anew_once_atoms_have_moved(structures):
    model = build(**all_outputs(KINDS["both filters"], 2, "positions")).eval()
    with torch.no_grad():
        model.displacement_head.strength[2].weight.mul_(50)
        plain, carried = (model(s) for s in (structures, structures.with_pairs(model.cutoff)))
        steps = plain["displacement"].norm(dim=-1)
    assert steps.max() > 0.5
    for name, x in plain.items():
        assert torch.equal(carried[name], x), name


@every_kind
def test_embeddings(changes, structures):
    model = build(**changes).eval()
    with torch.no_grad():
        plain, out = model(structures), model(structures, embeddings=True)
        assert set(out) - set(plain) == {"atom_embeddings", "system_embeddings"}
        atoms, systems = out["atom_embeddings"], out["system_embeddings"]
        assert atoms.shape == (29, 16)
        assert systems.shape == (4, 16)
        torch.testing.assert_close(
            systems, torch.zeros(4, 16).index_add(0, structures.system, atoms)
        )
        # What the energy is read from.
        head = model.head(atoms, structures.tags, structures.ptr)
        torch.testing.assert_close(model.normalizer.denormalize(head), out["energy"])
        order = torch.cat(
            [torch.arange(int(b) - 1, int(a) - 1, -1) for a, b in pairwise(structures.ptr)]
        )
        fields = ("atomic_numbers", "positions", "tags", "fixed")
        reversed_ = {name: getattr(structures, name)[order] for name in fields}
        other = replace(structures, **reversed_)
        again = model(other, embeddings=True)
        torch.testing.assert_close(again["atom_embeddings"], atoms[order], rtol=0, atol=1e-4)
        if model.rotation_invariant:
            q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0))).Q
            turned = replace(
                structures, positions=structures.positions @ q, cell=structures.cell @ q
            )
            again = model(turned, embeddings=True)
            torch.testing.assert_close(again["atom_embeddings"], atoms, rtol=0, atol=1e-4)


@every_kind
def test_a_step_of_training_under_bf16_autocast(changes, structures):
    model = build(**all_outputs(changes, 2, "positions")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        out = model(structures)
        loss = sum(x.square().mean() for x in out.values())
    assert {x.dtype for x in out.values()} == {torch.float32}
    assert loss.isfinite()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(before)
    with torch.autocast("cpu", torch.bfloat16):
        after = sum(x.square().mean() for x in model(structures).values())
    assert after.isfinite()


@some_variants
def test_bf16_autocast_stays_close(changes, structures):
    model = build(**changes).eval()
    with torch.no_grad():
        full = model(structures)["energy"]
        with torch.autocast("cpu", torch.bfloat16):
            half = model(structures)["energy"]
    assert half.dtype == torch.float32
    assert (full - half).abs().max() < 0.05 * full.abs().max()


@some_variants
def test_models_in_float64(changes, structures):
    """What float32 gives, to its rounding: nothing goes through less on the way."""
    single, double = build(**changes).eval(), build(**changes).eval().double()
    precise = replace(
        structures, positions=structures.positions.double(), cell=structures.cell.double()
    )
    with torch.no_grad():
        expected, out = double(precise), single(structures)
        mixed = double(structures), single(precise)
    for name, x in expected.items():
        assert x.dtype == torch.float64, name
        scale = x.abs().max()
        for other in (out, *mixed):
            assert (other[name].double() - x).abs().max() < 1e-4 * scale, name


@pytest.mark.parametrize("changes", [pytest.param(KINDS[name], id=name) for name in SOME])
def test_forces_by_autograd_are_minus_the_slope_and_differentiable(changes, structures):
    model = build(**changes).double()
    positions = structures.positions.double().requires_grad_()
    moving = replace(structures, positions=positions, cell=structures.cell.double())
    energy = model(moving)["energy"].sum()
    (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
    step = torch.zeros_like(positions)
    step[3, 1] = 1e-5
    with torch.no_grad():
        up, down = (
            model(replace(moving, positions=positions + s))["energy"].sum() for s in (step, -step)
        )
    assert slope[3, 1].item() == pytest.approx(float(up - down) / 2e-5, rel=1e-5, abs=1e-9)
    slope.square().sum().backward()
    assert model.embedding.element.weight.grad.abs().max() > 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_rpe_changes_energies_and_a_performer_does_not_see_positions(structures):
    moved = Structures(**{**vars(structures), "positions": structures.positions * 1.3})
    with torch.no_grad():
        blind = build(rpe=None)
        assert torch.equal(blind(structures)["energy"], blind(moved)["energy"])
        seeing = build()
        change = (seeing(structures)["energy"] - seeing(moved)["energy"]).abs()
    several = structures.natoms > 1
    assert (change[several] > 1e-4).all()
    assert change[~several].max() < 1e-5


def test_linear_and_exact_share_their_state_dict(structures):
    exact = build(attention="exact")
    linear = build()
    linear.load_state_dict(exact.state_dict())
    assert list(linear.state_dict()) == list(exact.state_dict())


def test_energy_of_a_hand_made_readout(structures):
    """With all weights of the head's last layer 0, E = mean + std · Σ_i w[tag_i] · bias."""
    model = build()
    with torch.no_grad():
        last = model.head.atom_energy[-1]
        last.weight.zero_()
        last.bias.fill_(0.5)
        energy = model(structures)["energy"]
    weights = torch.tensor([0.1, 0.3, 1.0])[structures.tags]
    sums = [float(weights[structures.system == b].sum()) for b in range(len(structures))]
    std = (14 / 3) ** 0.5  # of -3, 1, 2
    expected = torch.tensor([std * 0.5 * s for s in sums])
    assert torch.allclose(energy, expected, atol=1e-5)


@some_kinds
def test_same_energies_under_a_float64_default_dtype(changes, structures):
    before = build(**changes)
    torch.set_default_dtype(torch.float64)
    try:
        model = build(**changes)
        energy = model(structures)["energy"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert energy.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # Numbers from torch's own generator differ then; those from the configured seed do not.
    first, second = (dict(m.named_parameters()) for m in (before, model))
    drawn = {name for name, p in first.items() if not torch.equal(p, second[name])}
    assert all(name.startswith(("embedding", "head")) or ".ffn." in name for name in drawn)
    model.load_state_dict(before.state_dict())
    assert torch.equal(model(structures)["energy"], before(structures)["energy"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_translation_with_weights_of_other_dtypes(dtype, structures):
    model = build().to(dtype).eval()
    testing.check_translation(model, structures)


def test_seed_decides_the_random_features():
    key = "encoder.blocks.0.attention.feature_map.content_projection"
    assert torch.equal(build().state_dict()[key], build().state_dict()[key])
    assert not torch.equal(build().state_dict()[key], build(seed=1).state_dict()[key])


def test_elements_seen():
    model = build()
    model.mark_seen([1, 29])
    assert model.elements_seen.nonzero().flatten().tolist() == [1, 29]


@some_kinds
def test_torchs_global_generator(changes, structures):
    """It draws embeddings and feed-forward nets, and nothing after a model is built."""
    config = EnergyConfig(embed_dim=8, num_heads=2, num_layers=1, ffn_dim=8, num_features=4)
    for name, value in all_outputs(changes, 2, "positions").items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        models = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            models.append(EnergyModel(config).state_dict())
    assert all(torch.equal(x, models[1][key]) for key, x in models[0].items())
    changed = {key for key, x in models[0].items() if not torch.equal(x, models[2][key])}
    assert {key.split(".")[0] for key in changed} <= {"embedding", "encoder", "head"}
    assert all(".ffn." in key for key in changed if key.startswith("encoder"))
    model, state = build(**changes), torch.get_rng_state()
    model(structures)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_for_training(structures):
    model = build(**KINDS["both filters"], dropout=0.5)
    with torch.random.fork_rng(devices=[]):
        first, second = (model.train()(structures)["energy"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(model.eval()(structures)["energy"] for _ in range(2)))


def test_a_model_of_nothing_but_default_settings():
    assert EnergyModel().config == EnergyConfig()


def test_far_parts_and_vectors_are_in_the_last_blocks():
    pairs = small_pairs(filter_vectors=3, num_filters=5, vector_blocks=2, density=False)
    model = build(spectral=SPECTRAL, pairs=pairs, num_layers=3, far_blocks=1)
    blocks = model.encoder.blocks
    assert [block.attention is not None for block in blocks] == [False, False, True]
    assert [block.spectral is not None for block in blocks] == [False, False, True]
    assert [block.local.vectors for block in blocks] == [0, 3, 3]
    assert [block.local.num_filters for block in blocks] == [5, 5, 5]
    assert all(block.local_norm for block in blocks)
    model = build(pairs=small_pairs(norm=False), num_layers=3, far_blocks=3)
    assert [block.attention is not None for block in model.encoder.blocks] == [True] * 3
    assert not any(block.local_norm for block in model.encoder.blocks)


def test_blocks_without_a_far_part_have_no_idle_norm(structures):
    pairs = small_pairs(norm=False)
    model = build(spectral=SPECTRAL, pairs=pairs, rpe=None, num_layers=2, far_blocks=1)
    model(structures)["energy"].square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert sum("attention_norm" in name for name, _ in model.named_parameters()) == 2


def test_far_scale_scales_what_attention_and_spectral_filter_add_and_nothing_else():
    plain, scaled = (
        build(spectral=SpectralConfig(num_heads=2), far_scale=scale).state_dict()
        for scale in (1.0, 0.25)
    )
    changed = {name for name in plain if not torch.equal(plain[name], scaled[name])}
    far = {
        name for name in plain if name.endswith((".attention.out.weight", ".spectral.out.weight"))
    }
    assert changed - {"config_json"} == far != set()
    for name in far:
        torch.testing.assert_close(scaled[name], 0.25 * plain[name], rtol=0, atol=0)


def test_a_model_keeps_the_settings_it_was_built_with(structures):
    """Whatever becomes of the caller's: sweeps change one in a loop."""
    config = small_model(**all_outputs(KINDS["both filters"], 2)).config
    model, cutoff, order = EnergyModel(config).eval(), config.pairs.cutoff, list(config.outputs)
    with torch.no_grad():
        before = model(structures)
        config.pairs.cutoff, config.recycles = 1.5 * cutoff, 1
        config.outputs.reverse()
        after = model(structures)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    text = bytes(model.state_dict()[CONFIG_KEY].tolist())
    kept = EnergyConfig.model_validate(json.loads(text))
    assert (kept.pairs.cutoff, kept.recycles, kept.outputs) == (cutoff, 2, order)


@every_kind
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_positions_that_are_not_finite_are_named(changes, value, structures):
    model = build(**changes)
    if not (model.config.rpe or model.config.pairs or model.config.spectral or model.config.images):
        pytest.skip("it does not look at positions")
    positions = structures.positions.clone()
    positions[int(structures.ptr[2]), 1] = value
    with pytest.raises(ValueError, match=f"sid {structures.sid[2]}"):
        model(replace(structures, positions=positions))


@pytest.mark.parametrize("name", ["rpe", "both filters", "gaussian images"])
def test_atoms_that_a_recycle_moves_to_nowhere_are_not_blamed_on_the_data(name, structures):
    model = build(**all_outputs({**KINDS[name], "pairs": small_pairs()}, 2, "positions"))
    with torch.no_grad():
        model.displacement_head.strength[2].weight.mul_(torch.inf)
    with pytest.raises(ValueError, match="sid .*moves atoms"):
        model(structures)


@pytest.mark.parametrize(
    ("numbers", "tags"), [([0, 1], [0, 0]), ([1, 119], [0, 0]), ([1, 1], [0, 3])]
)
def test_atoms_that_are_none_are_named_by_their_sid(numbers, tags):
    one = Structures.single([1], [[0, 0, 0]], sid="fine")
    bad = Structures.single([1, 1], [[0, 0, 0], [0, 0, 1]], sid="odd")
    both = Structures.cat([one, bad])
    both.atomic_numbers[1:], both.tags[1:] = torch.tensor(numbers), torch.tensor(tags)
    with pytest.raises(ValueError, match="sid odd: atom"):
        build()(both)


def test_elements_that_are_none_are_not_marked():
    for numbers in ([0], [119], torch.tensor([-1])):
        with pytest.raises(ValueError, match=str(int(numbers[0]))):
            build().mark_seen(numbers)


def test_a_giant_is_refused_before_and_by_the_model(monkeypatch):
    chain = [[x, x, x] for x in range(0, 4000, 5)]
    cell = 4000 * torch.eye(3)
    giant = Structures.single([29] * 800, chain, cell=cell, pbc=True, sid="giant")
    model = build(**KINDS["spectral"])
    monkeypatch.setattr("flt_mol.models.energy._LARGE", 100)
    for refuse in (model.check, model):
        with pytest.raises(ValueError, match=r"sid giant: too large: 800 atoms .* GB"):
            refuse(giant)
    build(**KINDS["pairs"]).check(giant)
    crowd = Structures.single([29] * 80, torch.rand(80, 3), cell=cell, pbc=True, sid="crowd")
    monkeypatch.setattr("flt_mol.models.build.memory_at_hand", lambda device: 1e5)
    with pytest.raises(ValueError, match="sid crowd"):
        build(**KINDS["pairs"]).check(crowd)


def test_energies_of_elements_are_added_saved_and_loaded(tmp_path):
    config = EnergyConfig(embed_dim=16, num_layers=1)
    plain = EnergyModel(config).eval()
    total = deepcopy(plain)
    reference = torch.zeros(119)
    reference[1], reference[8] = -3.0, -68000.0
    total.normalizer.set_reference(reference)
    water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    systems = Structures.cat([water, water])
    expected = plain(systems)["energy"].double() - 68006.0
    for model in (total, load_model(save_checkpoint(tmp_path / "a.ckpt", total, {}))):
        found = model(systems)["energy"]
        assert found.dtype == torch.float64  # in float32 such totals have steps of 8 meV
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert model.reference_energies(systems).tolist() == [-68006.0] * 2
    assert plain.reference_energies(systems) is None
    plain.load_state_dict(total.state_dict())
    torch.testing.assert_close(plain(systems)["energy"], expected, atol=1e-5, rtol=0)


def test_normaliser():
    normalizer = Normalizer()
    normalizer.fit(torch.tensor([1.0, 2.0, 6.0]))
    assert (float(normalizer.mean), float(normalizer.std)) == (3.0, pytest.approx(14**0.5 / 3**0.5))
    assert normalizer.denormalize(torch.tensor(2.0)) == 3 + 2 * normalizer.std
    normalizer.fit(torch.tensor([1.0, 2.0, 6.0]), shift=False)
    assert (float(normalizer.mean), float(normalizer.std)) == (0.0, pytest.approx((41 / 3) ** 0.5))
    with pytest.warns(UserWarning, match="equal"):
        normalizer.fit(torch.full((3,), 5.0))
    assert (float(normalizer.mean), float(normalizer.std)) == (5.0, 1.0)
    for wrong in ([], [torch.nan], [1.0, torch.inf]):
        with pytest.raises(ValueError, match="target"):
            normalizer.fit(torch.tensor(wrong))
    with pytest.raises(ValueError, match="target"):
        normalizer.fit(torch.tensor([1e300, 1e300], dtype=torch.float64))


def test_tags_have_their_own_weights_in_the_readout():
    """The energy is Σ over atoms of the weight of their tag times what the atom says."""
    model = build(num_layers=1).eval()
    atoms = Structures.single([1, 1, 1], torch.zeros(3, 3), tags=[0, 1, 2])
    with torch.no_grad():
        model.head.tag_weight.copy_(torch.tensor([1.0, 10.0, 100.0]))
        x = model(atoms, embeddings=True)["atom_embeddings"]
        each = torch.cat(
            [
                model.head(x[i : i + 1], atoms.tags[i : i + 1], torch.tensor([0, 1]))
                for i in range(3)
            ]
        )
        model.head.tag_weight.fill_(1.0)
        plain = torch.cat(
            [
                model.head(x[i : i + 1], atoms.tags[i : i + 1], torch.tensor([0, 1]))
                for i in range(3)
            ]
        )
    torch.testing.assert_close(each, torch.tensor([1.0, 10.0, 100.0]) * plain)
