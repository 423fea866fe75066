"""Reading structures: LMDB files of OC20 records, and whatever ASE reads."""

from flt_mol.data.ase import AseDataset, from_ase, to_ase
from flt_mol.data.batching import collate, make_loader
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.lmdb import LmdbDataset, ShardedDataset
from flt_mol.data.open import open_dataset

__all__ = [
    "AseDataset",
    "LmdbDataset",
    "ShardedDataset",
    "StructuresDataset",
    "collate",
    "from_ase",
    "make_loader",
    "open_dataset",
    "to_ase",
]
