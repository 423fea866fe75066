# Sourced by the other scripts: makes a virtual environment with flt_mol and the extra "$1" in it.
VENV="${FLT_MOL_VENV:-.venv}"
if [ ! -x "$VENV/bin/python" ]; then
    PYTHON="${PYTHON:-$(command -v python3.11 || command -v python3)}"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed; $PYTHON is older. Set PYTHON=/path/to/python3.11" >&2
        exit 1
    }
    echo "== environment in $VENV"
    "$PYTHON" -m venv "$VENV"
fi
source "$VENV/bin/activate"
echo "== installing flt_mol[$1] (a minute, or more where torch has to be fetched)"
python -m pip install --quiet --constraint constraints.txt --editable ".[$1]"
