"""The data set emt_adsorption: slabs and adsorbates of ASE's effective medium theory, relaxed."""
