"""LMDB files: checked, opened once per process, read as data sets, written."""
