"""The command `flt-mol`: train | evaluate | predict | relax | export | submission … | data …."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from flt_mol.cli import data, evaluation, prediction, submission, training
from flt_mol.cli.console import say
from flt_mol.files import VERSION, NoteWarning

__all__ = ["app", "main"]

_PIPE_STATUS = 128 + 13  # signal.SIGPIPE, which not every system has
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="flt-mol",
    help="Linear-attention Transformers for 3D atoms.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
for group in (training, evaluation, prediction):
    app.registered_commands += group.app.registered_commands
app.add_typer(
    submission.app, name="submission", help="Make or check a file for OC20's leaderboard."
)
app.add_typer(data.app, name="data", help="Inspect, convert, split, download and verify data sets.")


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"flt_mol {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can correct end in one line and exit status 2.

    Interrupted by Ctrl-C the status is 130, by SIGTERM in training 143.
    """
    if "_FLT_MOL_COMPLETE" in os.environ:  # asked by the shell
        app(prog_name="flt-mol")
    given = list(sys.argv[1:] if arguments is None else arguments)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("always")
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category)
        shown: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
            text = str(message)
            known = text.partition(": ")[2] if category is NoteWarning else text
            if known not in shown:
                shown.add(known)
                say(f"flt-mol: warning: {text}", error=True)

        warnings.showwarning = show  # type: ignore[assignment]
        try:
            return _run(given)
        except BaseException as error:
            if (found := _explained(error)) is None:
                raise
            text, status = found
            for line in (text, *getattr(error, "__notes__", ())) if text else ():
                say(f"flt-mol: {line}", error=True)
            return status


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("flt-mol", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except _USAGE_ERROR as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise
        say(error.format_message(), error=True)  # type: ignore[attr-defined]
        return 2
    sys.stdout.flush()
    return 0


def _explained(error: BaseException) -> tuple[str, int] | None:
    """What to print, and the exit status; None for an error of this program."""
    if isinstance(error, BrokenPipeError):
        # As the shell reports it; what is still in the buffer must not raise once more at the end.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return "", _PIPE_STATUS
    if isinstance(error, _USAGE_ERROR):
        context = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context else ""
        return f"error: {error.format_message()}{where}", 2  # type: ignore[attr-defined]
    if isinstance(error, ModuleNotFoundError) and not (error.name or "flt_mol").startswith("flt_"):
        return f"error: {error.name} is not installed: pip install '.[train]'", 2
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "error: not enough memory; try a smaller batch size", 2
    if isinstance(error, ValueError | OSError):
        return f"error: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
        return "terminated", 128 + signal.SIGTERM
    return None
