"""Lightning without its talk, for as long as a training lasts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_lightning"]

_LOGGERS = ("lightning.pytorch", "lightning.fabric")
_HERE = (
    ".*does not have many workers.*",
    ".*isinstance.treespec, LeafSpec.*",
    # What is logged at ends of epochs is of all processes by then.
    "It is recommended to use `self.log",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out what Lightning logs as INFO, and warnings that have no meaning here.

    A logger whose level is not Lightning's own INFO is left alone, and levels and warnings' filters
    are afterwards what they were.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    talking = [logger for logger in loggers if logger.level == logging.INFO]
    with warnings.catch_warnings():
        for message in _HERE:
            warnings.filterwarnings("ignore", message=message)
        for logger in talking:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger in talking:
                logger.setLevel(logging.INFO)
