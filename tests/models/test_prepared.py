"""Batches that are prepared: what is attached, what drops it, and one graph for all of them."""

from dataclasses import replace

import pytest
import torch
from conftest import KINDS, all_outputs

from flt_mol import testing
from flt_mol.models import EnergyModel, named_config
from flt_mol.structures import Structures


def batch_of(seed, natoms):
    return testing.random_structures(torch.Generator().manual_seed(seed), natoms=natoms)


@pytest.fixture
def model(small_model):
    return small_model(**KINDS["both filters"])
