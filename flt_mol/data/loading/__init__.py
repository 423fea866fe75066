"""Batches for training: their order, their size, their neighbour pairs."""

from flt_mol.data.loading.batching import Loader, cached_pairs, collate, make_loader
from flt_mol.data.loading.pair_cache import PairCache
from flt_mol.data.loading.samplers import BatchSampler
from flt_mol.data.loading.statistics import target_statistics

__all__ = [
    "BatchSampler",
    "Loader",
    "PairCache",
    "cached_pairs",
    "collate",
    "make_loader",
    "target_statistics",
]
