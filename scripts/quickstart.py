"""Train flt-small-v2 on emt_adsorption and evaluate it, in an environment that has flt_mol[train].

Arguments are settings of the training, e.g. training.epochs=5.
"""

import sys
from datetime import datetime

from flt_mol.cli import main

if __name__ == "__main__":
    run = f"runs/quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    sys.exit(
        main(["train", "quickstart", f"output={run}", *sys.argv[1:]])
        or main(["evaluate", f"{run}/best.ckpt"])
    )
