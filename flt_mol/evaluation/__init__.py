"""Metrics, splits, reports and plots: how good a model's energies are."""

from flt_mol.data.tables import read_energies
from flt_mol.evaluation.checkpoint import evaluate_checkpoint
from flt_mol.evaluation.metrics import EnergyMetrics, bootstrap_intervals, metrics_of
from flt_mol.evaluation.plots import learning_curve, parity
from flt_mol.evaluation.report import table, write_csv, write_html, write_json
from flt_mol.evaluation.splits import SplitResult, evaluate_model, evaluate_splits
from flt_mol.evaluation.submission import check_submission, write_submission
from flt_mol.evaluation.summary import summarise
from flt_mol.evaluation.tables import score_files

__all__ = [
    "EnergyMetrics", "SplitResult", "bootstrap_intervals", "check_submission",
    "evaluate_checkpoint", "evaluate_model", "evaluate_splits", "learning_curve", "metrics_of",
    "parity", "read_energies", "score_files", "summarise", "table", "write_csv", "write_html",
    "write_json", "write_submission",
]  # fmt: skip
