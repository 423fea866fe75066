"""Fixtures of the tests of data, for the slow ones, too."""

from tests.data.conftest import pickle_pyg, write_lmdb

__all__ = ["pickle_pyg", "write_lmdb"]
