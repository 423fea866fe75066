"""Energies of new structures; import from `flt_mol.predict`."""
