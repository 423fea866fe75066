"""Measurements of the library itself: time, memory, fidelity, and the pictures of its documents.

Built on `functional` and `nn` alone; matplotlib loads only where something is drawn. The scripts in
``scripts/`` print what is here, the pages in ``docs/`` show it.
"""
