"""Reading, converting, splitting and loading structures, however they are held."""

from flt_mol.data.ase import AseDataset, from_ase, from_trajectories, to_ase
from flt_mol.data.aselmdb import AseLmdbDataset
from flt_mol.data.conversion import convert
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.flat import FlatDataset
from flt_mol.data.joined import JoinedDataset
from flt_mol.data.lmdb.dataset import LmdbDataset, ShardedDataset
from flt_mol.data.loader import BatchSampler, Loader, collate, make_loader, target_statistics
from flt_mol.data.memory import MemoryDataset
from flt_mol.data.open import open_dataset
from flt_mol.data.options import ReadOptions
from flt_mol.data.pyg import from_pyg
from flt_mol.data.slabs import tag_slab
from flt_mol.data.splitting import split

__all__ = [
    "AseDataset",
    "AseLmdbDataset",
    "BatchSampler",
    "FlatDataset",
    "JoinedDataset",
    "LmdbDataset",
    "Loader",
    "MemoryDataset",
    "ReadOptions",
    "ShardedDataset",
    "StructuresDataset",
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
