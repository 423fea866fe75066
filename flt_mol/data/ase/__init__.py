"""ASE's atoms, the files and databases that ASE reads, and trajectories of relaxations."""

from flt_mol.data.ase.dataset import AseDataset, from_ase, to_ase
from flt_mol.data.ase.trajectories import TrajectoryDataset, from_trajectories

__all__ = ["AseDataset", "TrajectoryDataset", "from_ase", "from_trajectories", "to_ase"]
