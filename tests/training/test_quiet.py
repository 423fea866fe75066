"""Lightning is silent while a training lasts, and what it was afterwards."""

import logging
import subprocess
import sys

import pytest

from flt_mol.training.quiet import quiet_lightning

LOGGER = logging.getLogger("lightning.pytorch")


@pytest.fixture(autouse=True)
def _restored():
    level = LOGGER.level
    yield
    LOGGER.setLevel(level)


@pytest.mark.parametrize(
    ("own", "meanwhile"),
    [
        (logging.INFO, logging.WARNING),
        (logging.DEBUG, logging.DEBUG),
        (logging.ERROR, logging.ERROR),
    ],
)
def test_levels_are_given_back(own, meanwhile):
    LOGGER.setLevel(own)
    found = []

    def interrupted():
        with quiet_lightning():
            found.append(LOGGER.level)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert found == [meanwhile]
    assert LOGGER.level == own


SCRIPT = """
import logging
from rich.console import Console
from flt_mol.training.config import load_run_config
from flt_mol.training.run import train

config = load_run_config("emt_small", ["data.train=val_id", "training.max_steps=1",
    "model.embed_dim=8", "model.num_layers=1", "model.num_features=8", "output=run"])
train(config, console=Console(quiet=True))
print(logging.getLogger("lightning.pytorch").level)
"""


def test_training_from_python_prints_nothing_of_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["20"]
    assert "GPU" not in done.stderr
    assert "Tip" not in done.stderr
    assert "Trainer" not in done.stderr
