#!/usr/bin/env bash
# Sets up an environment of its own and runs ruff, import-linter, mypy, mkdocs, doctests and the tests.
# --all adds the tests marked slow (compilers, several processes, kills, statistics, wheel, fuzzing).
# Other arguments go to pytest. PYTHON chooses the interpreter (3.11), FLT_MOL_VENV the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MARKS=(-m "not slow")
ARGUMENTS=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then MARKS=(); else ARGUMENTS+=("$argument"); fi
done
source scripts/environment.sh "test"

# Tests work on tiny tensors, where a second thread only waits for the first.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== ruff"
ruff check .
ruff format --check .
echo "== import-linter"
lint-imports
echo "== mypy"
mypy flt_mol
echo "== site"
NO_MKDOCS_2_WARNING=1 mkdocs build --strict
echo "== doctests and tests"
python -m pytest -q -n 2 --dist worksteal "${MARKS[@]}" --doctest-modules flt_mol tests "${ARGUMENTS[@]}"
