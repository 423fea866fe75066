"""`.aselmdb`: ASE's database rows in an LMDB file."""

from flt_mol.data.aselmdb.dataset import AseLmdbDataset, encode_row, write_aselmdb

__all__ = ["AseLmdbDataset", "encode_row", "write_aselmdb"]
