"""Small instances of every layer, each a function seed → layer under test."""

import torch
from torch import nn

from flt_mol.functional.neighbors import neighbor_pairs
from flt_mol.models import EnergyConfig, EnergyModel, RPEConfig
from flt_mol.nn import ImageKeys, LocalBasis, LocalFilter, PairCorrection
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.block import FLTBlock, FLTEncoder
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.multihead import FLTMultiheadAttention
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral_filter import SpectralFilter
from flt_mol.nn.spectrum import SPECTRA, GaussianSpectrum
from helpers.checks import PaddedLayer
from helpers.invariances import PackedLayer

C, H = 8, 2
CUTOFF = 4.0  # Å


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def from_seed(seed, function, *arguments, **settings):
    """What draws from torch's global generator, with a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return function(*arguments, **settings)


def make_rpe(generator, dim=3, frequencies=None, spectrum=None):
    """Gaussians of 2 to 3 Å, or tokens, with a few random frequencies or those given."""
    if spectrum is None:
        spectrum = GaussianSpectrum(H, 3, dim, sigma_min=2.0, sigma_max=3.0, generator=generator)
    else:
        spectrum = SPECTRA[spectrum](H, 3, dim, generator=generator)
    if frequencies is None:
        frequencies = GaussianFrequencies(5, dim, generator=generator)
    return FourierRPE(spectrum, frequencies)


def make_attention(seed, dim=3, frequencies=None, spectrum=None, **settings):
    """FLTAttention with an RPE in `dim` dimensions, or with none."""
    generator = seeded(seed)
    own = None if dim is None else make_rpe(generator, dim, frequencies, spectrum)
    return FLTAttention(C, H, rpe=own, generator=generator, **settings)


def attention(**settings):
    return lambda seed: PackedLayer(make_attention(seed, **settings))


def padded(**settings):
    return lambda seed: PaddedLayer(make_attention(seed, **settings))


def multihead(**settings):
    def call(module, x, positions, mask):
        return module(x, x, x, key_padding_mask=~mask, positions=positions)[0]

    def build(seed):
        generator = seeded(seed)
        settings_ = {"rpe": make_rpe(generator), "generator": generator, **settings}
        layer = FLTMultiheadAttention(C, H, batch_first=True, **settings_)
        return PaddedLayer(layer, call)

    return build


def cross(**settings):
    """Keys are the rows whose first feature is positive: any number in each system, even none."""

    def call(module, rows):
        keys = rows.x[:, 0] > 0
        return module(
            rows.x,
            rows.positions,
            system=rows.system,
            num_systems=len(rows),
            context=rows.x[keys],
            context_positions=None if rows.positions is None else rows.positions[keys],
            context_system=rows.system[keys],
        )

    return lambda seed: PackedLayer(make_attention(seed, **settings), call)


def shared_attention(generator, mode):
    return FLTAttention(C, H, num_features=16, position_dim=10, mode=mode, generator=generator)


def block(mode):
    def call(parts, rows):
        features = parts["rpe"](rows.positions, rows.ptr)
        return parts["block"](rows.x, rows.ptr, position_features=features)

    def build(seed):
        generator = seeded(seed)
        layer = from_seed(seed, FLTBlock, shared_attention(generator, mode), 16)
        return PackedLayer(nn.ModuleDict({"rpe": make_rpe(generator), "block": layer}), call)

    return build


def encoder(mode):
    def build(seed):
        generator = seeded(seed)
        layers = [shared_attention(generator, mode) for _ in range(2)]
        blocks = [from_seed(seed, FLTBlock, layer, 16) for layer in layers]
        return PackedLayer(
            FLTEncoder(blocks, make_rpe(generator), recycles=2),
            lambda module, rows: module(rows.x, rows.positions, rows.ptr),
        )

    return build


def energy_model(mode):
    def build(seed):
        sizes = {"embed_dim": C, "num_heads": H, "num_layers": 2, "ffn_dim": 16}
        rpe = RPEConfig(
            spectrum={"name": "gaussian", "num_terms": 3},
            frequencies={"name": "gaussian", "num_frequencies": 5},
        )
        config = EnergyConfig(**sizes, num_features=16, attention=mode, rpe=rpe, seed=seed)
        model = from_seed(seed, EnergyModel, config)
        return PackedLayer(model, lambda m, rows: m(rows.structures)["energy"][rows.system, None])

    return build


def spectral_filter(**settings):
    def call(module, rows):
        geometry = module.geometry(rows.positions, rows.cell, rows.pbc, rows.ptr)
        return module(rows.x, geometry)

    def build(seed):
        layer = SpectralFilter(C, H, generator=seeded(seed), sigma_max=2.0)
        for name, value in settings.items():
            setattr(layer, name, value)
        return PackedLayer(layer, call)

    return build


def neighbours(rows, **settings):
    """Pairs within CUTOFF and the vectors between them."""
    pairs = neighbor_pairs(rows.positions, rows.cell, rows.pbc, rows.ptr, CUTOFF, **settings)
    return pairs, pairs.vectors(rows.positions, rows.cell, rows.ptr)


def corrected_attention(mode):
    def call(parts, rows):
        pairs, vectors = neighbours(rows)
        weights = parts["pairs"](pairs, vectors, rows.atomic_numbers)
        return parts["attention"](rows.x, ptr=rows.ptr, pairs=weights)

    def build(seed):
        layer = make_attention(seed, dim=None, mode=mode)
        pairs = PairCorrection(H, CUTOFF, num_basis=8, generator=seeded(seed))
        return PackedLayer(nn.ModuleDict({"attention": layer, "pairs": pairs}), call)

    return build


def image_attention(seed):
    def call(parts, rows):
        pairs, vectors = neighbours(rows, self_pairs=True)
        images = parts["images"](pairs, vectors)
        return parts["attention"](rows.x, ptr=rows.ptr, images=images)

    spectrum = GaussianSpectrum(H, 3, generator=seeded(seed))
    layer = make_attention(seed, dim=None, mode="exact")
    parts = {"attention": layer, "images": ImageKeys(spectrum, CUTOFF)}
    return PackedLayer(nn.ModuleDict(parts), call)


def local_filter(vectors=0, **settings):
    def call(parts, rows):
        local = parts["basis"](*neighbours(rows), rows.atomic_numbers)
        return parts["filter"](rows.x, local)

    def build(seed):
        width = 5 if vectors else 0
        basis = LocalBasis(CUTOFF, 8, width, generator=seeded(seed), **settings)
        layer = LocalFilter(C, 8, vectors, width, seeded(seed + 10))
        return PackedLayer(nn.ModuleDict({"basis": basis, "filter": layer}), call)

    return build


def blocks_with_filters(*parts, count=1, **settings):
    """A stack of blocks of these parts: attention without positions, spectral and local filters."""

    def make_block(seed):
        return from_seed(
            seed,
            FLTBlock,
            make_attention(seed, dim=None, **settings) if "attention" in parts else None,
            16,
            spectral=SpectralFilter(C, H, sigma_max=2.0, generator=seeded(seed + 20))
            if "spectral" in parts
            else None,
            local=LocalFilter(C, 8, 2, 5, seeded(seed + 10)) if "local" in parts else None,
        )

    def call(modules, rows):
        given = {}
        if "local" in parts:
            given["local"] = modules["basis"](*neighbours(rows))
        if "spectral" in parts:
            geometry = modules["stack"].blocks[0].spectral.geometry
            given["plane_waves"] = geometry(rows.positions, rows.cell, rows.pbc, rows.ptr)
        return modules["stack"](rows.x, ptr=rows.ptr, **given)

    def build(seed):
        stack = FLTEncoder([make_block(seed + k) for k in range(count)], recycles=count)
        basis = LocalBasis(CUTOFF, 8, 5, generator=seeded(seed))
        return PackedLayer(nn.ModuleDict({"basis": basis, "stack": stack}), call)

    return build
