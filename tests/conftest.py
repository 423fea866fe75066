"""What several test folders share."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from flt_mol.models import EnergyConfig, EnergyModel
from flt_mol.models.energy import RPEConfig

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


def small_model(**changes) -> EnergyModel:
    """A model for tests: quick, but with every part of the shipped ones."""
    settings = {
        "embed_dim": 16,
        "num_heads": 2,
        "num_layers": 2,
        "ffn_dim": 32,
        "num_features": 16,
        "rpe": RPEConfig(num_terms=4, num_frequencies=6),
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EnergyModel(EnergyConfig(**settings))
