"""Damaged, foreign and hostile files, and a judge of what reading them does.

`scripts/fuzz_files.py` runs many of them, `tests/data/test_fuzz.py` some.
"""
