"""`python -m flt_mol` is `flt-mol`."""

import sys

from flt_mol.cli import main

if __name__ == "__main__":
    sys.exit(main())
