#!/usr/bin/env bash
# Sets up an environment of its own and runs every check: ruff, mypy, doctests, the test suite.
# PYTHON chooses the interpreter (3.11), FLT_MOL_VENV the folder of the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "test"

# Tests work on tiny tensors, where a second thread only waits for the first.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== ruff"
ruff check .
ruff format --check .
echo "== mypy"
mypy flt_mol
echo "== doctests"
python -m pytest --doctest-modules flt_mol -q
echo "== tests"
python -m pytest -q "$@"
