"""How fast things are: points measured in fresh processes, floors that were counted, pages."""
