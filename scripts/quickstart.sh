#!/usr/bin/env bash
# From an empty machine with Python 3.11 to a trained and evaluated IS2RE model.
# PYTHON chooses the interpreter, FLT_MOL_VENV the folder of the environment; further arguments
# are settings of the training, e.g. training.epochs=5.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "train"

echo "== flt-mol train quickstart, flt-mol evaluate"
python scripts/quickstart.py "$@"
echo "To use flt-mol in this shell: source $VENV/bin/activate"
