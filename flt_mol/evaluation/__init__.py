"""Metrics, splits, reports and plots: how good a model's energies are.

Nothing here loads ASE, LMDB, matplotlib or rich before it is needed.
"""

from flt_mol.evaluation.breakdowns import breakdowns
from flt_mol.evaluation.intervals import bootstrap_intervals
from flt_mol.evaluation.matching import score_files
from flt_mol.evaluation.metrics import (
    EWT_THRESHOLD,
    EnergyMetrics,
    ewt,
    mae,
    median_ae,
    metrics_of,
)
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.report import maes, rich_table, table, write_csv, write_json
from flt_mol.evaluation.splits import (
    SplitResult,
    check_elements,
    evaluate_model,
    evaluate_splits,
)
from flt_mol.evaluation.submission import check_submission, write_submission
from flt_mol.evaluation.summary import summarise

__all__ = [
    "EWT_THRESHOLD",
    "EnergyMetrics",
    "SplitResult",
    "bootstrap_intervals",
    "breakdowns",
    "check_elements",
    "check_submission",
    "evaluate_model",
    "evaluate_splits",
    "ewt",
    "learning_curve",
    "mae",
    "maes",
    "median_ae",
    "metrics_of",
    "parity",
    "rich_table",
    "score_files",
    "summarise",
    "table",
    "write_csv",
    "write_json",
    "write_submission",
]
