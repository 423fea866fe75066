"""Pickled records, read without running anything that they ask for."""
