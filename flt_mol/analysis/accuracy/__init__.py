"""Accuracy side by side: our models and others' trained by one loop, tables and verdicts.

`rows` names the models, `rivals` wraps those of other packages, `loop` trains and evaluates,
`times` has rows take turns on the same batches, `results` keeps what was measured, `table`,
`verdict` and `report` show it, `runs` is what ``scripts/accuracy_table.py`` calls. `charges` and
`long_range` are for a second table, of energies that reach farther than any cutoff.
"""
