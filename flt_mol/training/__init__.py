"""Training of models: typed configuration, Lightning task, checkpoints."""
