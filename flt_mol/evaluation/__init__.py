"""Metrics, splits, reports and plots: how good a model's energies are.

Nothing here loads ASE, LMDB, matplotlib or rich before it is needed.
"""

from flt_mol.evaluation.metrics import EWT_THRESHOLD, EnergyMetrics, ewt, mae
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.report import maes, rich_table, table, write_csv, write_json
from flt_mol.evaluation.splits import (
    SplitResult,
    check_elements,
    evaluate_model,
    evaluate_splits,
)

__all__ = [
    "EWT_THRESHOLD",
    "EnergyMetrics",
    "SplitResult",
    "check_elements",
    "evaluate_model",
    "evaluate_splits",
    "ewt",
    "learning_curve",
    "mae",
    "maes",
    "parity",
    "rich_table",
    "table",
    "write_csv",
    "write_json",
]
