"""Training of models: typed configuration, Lightning task, checkpoints."""

from flt_mol.files import import_matplotlib

import_matplotlib()  # which Lightning does, too
