"""Training of models: typed configuration, Lightning task, checkpoints."""

import os

if "MPLBACKEND" in os.environ:  # before Lightning imports it
    from flt_mol.evaluation.plots import import_matplotlib

    import_matplotlib()
