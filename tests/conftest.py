"""What several test folders share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from flt_mol.models import EnergyConfig, EnergyModel
from flt_mol.models.config import ImageConfig, PairConfig, RPEConfig, SpectralConfig

# The same examples in every run, and no verdicts by the clock: what lands must not depend on luck.
settings.register_profile(
    "house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")


@pytest.fixture(scope="session")
def oc20_data() -> Path:
    """Folder with genuine OC20 files, from the environment variable FLT_MOL_TEST_DATA."""
    folder = os.environ.get("FLT_MOL_TEST_DATA")
    if not folder:
        pytest.skip("FLT_MOL_TEST_DATA is not set: genuine OC20 files are missing")
    return Path(folder) / "oc20"


CUTOFF = 4.0  # Å


def small_pairs(**changes) -> PairConfig:
    """A few functions on neighbour pairs within CUTOFF."""
    return PairConfig(**{"cutoff": CUTOFF, "num_basis": 8, "vector_basis": 4, **changes})


def small_images(**changes) -> ImageConfig:
    """Images within CUTOFF under a mask of a few Gaussians."""
    return ImageConfig(**{"cutoff": CUTOFF, "num_basis": 6, "pair_types": False, **changes})


SPECTRAL = SpectralConfig(num_heads=2, num_basis=4)
BLIND = {"rpe": None}
EXACT = {"attention": "exact", "rpe": None}
ALL_OUTPUTS = ["energy", "energy_initial", "displacement"]

# One energy model of each kind: changes to what `small_model` builds.
KINDS = {
    "rpe": {},
    "rpe, exact": {"attention": "exact"},
    "rpe, auto": {"attention": "auto"},
    "rpe, both filters": {"spectral": SPECTRAL, "pairs": small_pairs(vectors=4, filter_vectors=3)},
    "performer": BLIND,
    "performer, relu": {**BLIND, "feature_map": "relu"},
    "spectral": {**BLIND, "spectral": SPECTRAL},
    "spectral alone": {**BLIND, "attention": "none", "spectral": SPECTRAL},
    "charges": {
        **BLIND,
        "spectral": SPECTRAL.model_copy(update={"charges": 3}),
        "pairs": small_pairs(),
    },
    "pairs": {**BLIND, "pairs": small_pairs()},
    "pairs alone": {**BLIND, "attention": "none", "pairs": small_pairs(density=False)},
    "vectors alone": {
        **BLIND,
        "attention": "none",
        "pairs": small_pairs(vectors=4, filter_vectors=3),
    },
    "pair types": {**BLIND, "pairs": small_pairs(vectors=4, pair_types=True)},
    "both filters": {
        **BLIND,
        "spectral": SPECTRAL,
        "pairs": small_pairs(vectors=4, filter_vectors=3),
    },
    "both, no density": {**BLIND, "spectral": SPECTRAL, "pairs": small_pairs(density=False)},
    "density": {**BLIND, "pairs": small_pairs(filter=False)},
    "correction": {
        **BLIND,
        "pairs": small_pairs(filter=False, density=False, correction=True),
    },
    "correction, pair types": {**BLIND, "pairs": small_pairs(correction=True, pair_types=True)},
    "auto": {**BLIND, "attention": "auto", "spectral": SPECTRAL, "pairs": small_pairs()},
    "exact": {**EXACT, "spectral": SPECTRAL, "pairs": small_pairs()},
    "gaussian images": {**EXACT, "images": small_images(mask="gaussian", density=False)},
    "centred images": {**EXACT, "images": small_images(mask="centred")},
    "centred images, pair types": {
        **EXACT,
        "images": small_images(mask="centred", pair_types=True),
        "pairs": small_pairs(filter=False),
        "spectral": SPECTRAL,
    },
    "sum": {
        **EXACT,
        "readout": "sum",
        "head_norm": False,
        "pairs": small_pairs(vectors=4, filter_vectors=3),
    },
    "mean": {**BLIND, "readout": "mean", "spectral": SPECTRAL, "pairs": small_pairs()},
}


def small_rpe(split="one_sided", **spectrum) -> RPEConfig:
    """Gaussian spectrum and frequencies of few terms."""
    spectrum = {"num_terms": 4, "sigma_min": 0.7, "sigma_max": 6.0, **spectrum}
    return RPEConfig(
        spectrum={"name": "gaussian", **spectrum},
        frequencies={"name": "gaussian", "num_frequencies": 6},
        split=split,
    )


def all_outputs(changes, recycles=2, feedback="features") -> dict:
    """The same kind of model, with all outputs that it can have and several recycles."""
    moves = changes.get("pairs") is not None
    return {
        **changes,
        "outputs": ALL_OUTPUTS if moves else ALL_OUTPUTS[:2],
        "recycles": recycles,
        "feedback": feedback if moves else "features",
    }


def small_model(**changes) -> EnergyModel:
    """A model for tests: quick, but with every part of the shipped ones."""
    settings = {
        "embed_dim": 16,
        "num_heads": 2,
        "num_layers": 2,
        "ffn_dim": 32,
        "num_features": 16,
        "rpe": small_rpe(),
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EnergyModel(EnergyConfig(**settings))
