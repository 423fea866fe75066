"""Reading, converting, splitting and loading structures, however they are held."""

from flt_mol.data.ase import from_ase, to_ase
from flt_mol.data.conversion import convert
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.flat import FlatDataset
from flt_mol.data.lmdb import LmdbDataset
from flt_mol.data.loader import BatchSampler, Loader, collate, make_loader, target_statistics
from flt_mol.data.opening import open_dataset
from flt_mol.data.schema import ReadOptions
from flt_mol.data.splitting import split
from flt_mol.data.tags import tag_slab
from flt_mol.data.trajectories import from_trajectories

__all__ = [
    "BatchSampler", "FlatDataset", "LmdbDataset", "Loader", "ReadOptions", "StructuresDataset",
    "collate", "convert", "from_ase", "from_trajectories", "make_loader", "open_dataset",
    "split", "tag_slab", "target_statistics", "to_ase",
]  # fmt: skip
