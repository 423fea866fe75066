"""Slabs whose atoms are not told apart yet: surface, adsorbate, and what is below."""

from flt_mol.data.slabs.tagging import tag_slab, tag_structures

__all__ = ["tag_slab", "tag_structures"]
