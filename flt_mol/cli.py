"""The command `flt-mol`: train | evaluate | predict | export | submission … | data …."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import flt_mol
from flt_mol.commands import run_predict, run_train
from flt_mol.data_cli import add_data_commands
from flt_mol.evaluation_cli import CHECKPOINT, add_evaluate_command, add_running
from flt_mol.export_cli import add_export
from flt_mol.files import shipped_folder
from flt_mol.outputs import say
from flt_mol.predict_cli import add_predict_options
from flt_mol.submission_commands import add_submission_commands

_PIPE_STATUS = 128 + 13  # signal.SIGPIPE, which not every system has


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend end in one line and exit status 2.

    Interrupted by Ctrl-C the status is 130, by SIGTERM in training 143.
    """
    options = _parse(arguments)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("default")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.showwarning = _show_warning
        try:
            options.run(options)
            sys.stdout.flush()
        except BrokenPipeError:
            return _reader_left()
        except (ValueError, OSError) as error:
            return _fail(error, f"error: {error}", 2)
        except ModuleNotFoundError as error:
            if (error.name or "flt_mol").startswith("flt_mol"):
                raise
            return _fail(error, f"error: {_missing(error)}", 2)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return _fail(error, "error: not enough memory; try a smaller batch size", 2)
        except KeyboardInterrupt as error:
            return _fail(error, "interrupted", 130)
        except SystemExit as error:
            if error.code != 128 + signal.SIGTERM:
                raise
            return _fail(error, "terminated", 128 + signal.SIGTERM)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may come after options, too, which argparse would leave over."""
    parser = build_parser()
    options, late = parser.parse_known_args(arguments)
    if late and (not hasattr(options, "overrides") or any(text.startswith("-") for text in late)):
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        options.overrides = [*options.overrides, *late]
    return options


def _fail(error: BaseException, text: str, status: int) -> int:
    """One line, and the notes of whoever let the error pass."""
    for line in (text, *getattr(error, "__notes__", ())):
        say(f"flt-mol: {line}", sys.stderr)
    return status


def _missing(error: ModuleNotFoundError) -> str:
    return (
        f"this needs '{error.name}', which is not installed: install flt_mol with its extra, "
        "e.g. pip install '.[train]'"
    )


def _reader_left() -> int:
    """As the shell reports it; what is still in the buffer must not raise once more at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return _PIPE_STATUS


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    say(f"flt-mol: warning: {message}", sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="flt-mol", description="Linear-attention Transformers for 3D atoms."
    )
    parser.add_argument("--version", action="version", version=f"flt_mol {flt_mol.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    add_evaluate_command(commands)
    _add_predict(commands)
    add_export(commands)
    add_submission_commands(commands)
    data = commands.add_parser("data", help="look at, convert, split, get and check data sets")
    add_data_commands(data.add_subparsers(required=True, metavar="COMMAND"))
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model",
        description="Train the model of a run; writes checkpoints, logs and plots.",
        epilog=f"Runs in configs/: {', '.join(_runs())}. Keys of overrides: --print-config prints "
        "all with their values, docs/settings.md says what each is.",
    )
    parser.add_argument("config", help="name in configs/, or path to a .yaml file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="Hydra overrides, e.g. training.epochs=5 model=emt_performer_small output=runs/mine",
    )
    parser.add_argument(
        "--finetune",
        metavar="CHECKPOINT",
        help=f"start from its weights, with its model: {CHECKPOINT}",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="train every combination of overrides that give several values, "
        "e.g. training.learning_rate=1e-3,2e-3 training.seed=0,1",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as yaml, and train nothing"
    )
    parser.set_defaults(run=run_train)


def _runs() -> list[str]:
    try:
        return sorted(file.stem for file in shipped_folder("configs").glob("*.yaml"))
    except FileNotFoundError:  # a broken installation, which what needs the files will tell
        return []


def _add_predict(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="energies of structures in files",
        description="Energies (eV) of all structures in FILES: LMDB, and whatever ASE reads.",
    )
    parser.add_argument("checkpoint", help=CHECKPOINT)
    add_predict_options(parser)
    add_running(parser)
    parser.set_defaults(run=run_predict)


if __name__ == "__main__":
    sys.exit(main())
