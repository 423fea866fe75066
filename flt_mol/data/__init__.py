"""Reading, converting, splitting and loading structures, however they are held."""

from flt_mol.data.ase import AseDataset, from_ase, from_trajectories, to_ase
from flt_mol.data.aselmdb import AseLmdbDataset
from flt_mol.data.compact.dataset import CompactDataset
from flt_mol.data.conversion import convert
from flt_mol.data.conversion.split import split
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.joined import JoinedDataset
from flt_mol.data.lmdb.dataset import LmdbDataset, ShardedDataset
from flt_mol.data.loading import (
    BatchSampler,
    Loader,
    PairCache,
    cached_pairs,
    collate,
    make_loader,
    target_statistics,
)
from flt_mol.data.memory import MemoryDataset
from flt_mol.data.open import open_dataset
from flt_mol.data.options import ReadOptions
from flt_mol.data.pyg import from_pyg
from flt_mol.data.slabs import tag_slab

__all__ = [
    "AseDataset",
    "AseLmdbDataset",
    "BatchSampler",
    "CompactDataset",
    "JoinedDataset",
    "LmdbDataset",
    "Loader",
    "MemoryDataset",
    "PairCache",
    "ReadOptions",
    "ShardedDataset",
    "StructuresDataset",
    "cached_pairs",
    "collate",
    "convert",
    "from_ase",
    "from_pyg",
    "from_trajectories",
    "make_loader",
    "open_dataset",
    "split",
    "tag_slab",
    "target_statistics",
    "to_ase",
]
