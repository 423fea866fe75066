"""The command `flt-mol`: train | evaluate | predict | data inspect | data emt."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flt_mol

Command = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that a user can mend end in one line and exit status 2."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("default")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.showwarning = _show_warning
        try:
            options.run(options)
        except (ValueError, OSError) as error:
            print(f"flt-mol: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("flt-mol: interrupted", file=sys.stderr)
            return 130
    return 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    print(f"flt-mol: warning: {message}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="flt-mol", description="Linear-attention Transformers for 3D atoms."
    )
    parser.add_argument("--version", action="version", version=f"flt_mol {flt_mol.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_evaluate(commands)
    _add_predict(commands)
    data = commands.add_parser("data", help="look at and make data sets")
    _add_data(data.add_subparsers(required=True, metavar="COMMAND"))
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model",
        description="Train the model of a run; writes checkpoints, logs and plots.",
    )
    parser.add_argument("config", help="name in configs/, or path to a .yaml file")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="Hydra overrides, e.g. training.epochs=5 model=emt_performer_small output=runs/mine",
    )
    parser.set_defaults(run=run_train)


def _add_evaluate(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="energy MAE and EwT of a checkpoint",
        description="Energy MAE and EwT (error below 0.02 eV) of a checkpoint on each split.",
    )
    parser.add_argument("checkpoint", help="a .ckpt file, a run's folder, or a shipped model")
    parser.add_argument(
        "--data",
        help="name in datasets/, a folder with dataset.yaml, or a file or folder of records "
        "(default: what the checkpoint was trained on)",
    )
    parser.add_argument(
        "--split", action="append", help="split of the data set; may be repeated (default: all val)"
    )
    parser.add_argument("--output", type=Path, help="folder for results (default: beside the run)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    _add_device(parser)
    parser.set_defaults(run=run_evaluate)


def _add_predict(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="energies of structures in files",
        description="Energies (eV) of all structures in FILES: LMDB, and whatever ASE reads.",
    )
    parser.add_argument("checkpoint", help="a .ckpt file, a run's folder, or a shipped model")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("predictions.csv"), help=".csv or .json"
    )
    _add_device(parser)
    parser.set_defaults(run=run_predict)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64, help="systems per step")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")


def _add_data(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="what a file or folder of records holds")
    inspect.add_argument("path", help="LMDB file or folder, anything ASE reads, or a data set")
    inspect.add_argument("--split", help="split, when PATH is a data set")
    inspect.add_argument("--json", action="store_true", help="print as JSON, with a count")
    inspect.set_defaults(run=run_inspect)
    emt = commands.add_parser("emt", help="make the data set emt_adsorption with ASE's EMT")
    emt.add_argument("output", type=Path, help="folder for the data set")
    emt.add_argument("--seed", type=int, default=0)
    emt.add_argument("--num-slabs", type=int, help="slabs of all splits; default as shipped")
    emt.add_argument("--workers", type=int, default=2, help="processes")
    emt.set_defaults(run=run_emt)


def run_train(options: argparse.Namespace) -> None:
    """`flt-mol train`."""
    try:
        from flt_mol.training.config import load_run_config
        from flt_mol.training.run import train
    except ModuleNotFoundError as error:
        raise ValueError(
            f"training needs '{error.name}', which is not installed: pip install 'flt_mol[train]'"
        ) from error
    from rich.console import Console

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    console = Console()
    config = load_run_config(options.config, options.overrides)
    result = train(config, name=Path(options.config).stem, console=console)
    best = result.best
    console.print(
        f"best epoch {int(best['epoch'])}: {config.data.validation} "
        f"MAE {best['val/mae']:.4f} eV, EwT {100 * best['val/ewt']:.2f} %"
    )
    _print_files(result.files)


def run_evaluate(options: argparse.Namespace) -> None:
    """`flt-mol evaluate`."""
    from rich.console import Console
    from rich.progress import Progress

    from flt_mol.data.splits import open_splits
    from flt_mol.evaluation import report
    from flt_mol.evaluation.plots import parity
    from flt_mol.evaluation.splits import evaluate_splits
    from flt_mol.training.checkpoints import find_checkpoint, load_model, read_checkpoint

    checkpoint = find_checkpoint(options.checkpoint)
    model = load_model(checkpoint, map_location=options.device)
    trained_on = read_checkpoint(checkpoint).get("config", {}).get("data", {})
    splits, baselines = open_splits(options.data, options.split, trained_on)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = {split: bar.add_task(split, total=len(data)) for split, data in splits.items()}
        results = evaluate_splits(
            model,
            splits,
            options.batch_size,
            progress=lambda split, done, total: bar.update(task[split], completed=done),
        )
    folder = options.output or _evaluation_folder(checkpoint)
    files = (
        report.write_json(
            results, folder / "results.json", baselines, checkpoint=str(options.checkpoint)
        ),
        report.write_csv(results, folder / "predictions.csv"),
        parity(results, folder / "parity.png"),
    )
    if options.json:
        print(files[0].read_text(encoding="utf-8"), end="")
        return
    print(report.table(results, baselines))
    _print_files(files)


def run_predict(options: argparse.Namespace) -> None:
    """`flt-mol predict`."""
    from flt_mol.predict import predict_files, write_predictions
    from flt_mol.training.checkpoints import load_model

    model = load_model(options.checkpoint, map_location=options.device)
    predictions = predict_files(model, options.files, options.batch_size)
    write_predictions(predictions, options.output)
    width = max(len(p.name) for p in predictions)
    for p in predictions:
        print(f"{p.name:<{width}}  {p.energy:12.6f} eV")
    _print_files([options.output])


def run_inspect(options: argparse.Namespace) -> None:
    """`flt-mol data inspect`."""
    from flt_mol.data import inspect
    from flt_mol.data.splits import open_source

    summary = inspect.summarise(open_source(options.path, options.split))
    print(json.dumps(summary, indent=2) if options.json else inspect.render(summary))


def run_emt(options: argparse.Namespace) -> None:
    """`flt-mol data emt`."""
    from flt_mol.data.emt_dataset import generate
    from flt_mol.data.emt_plan import NUM_SLABS

    slabs = NUM_SLABS if options.num_slabs is None else options.num_slabs
    generate(options.output, seed=options.seed, num_slabs=slabs, workers=options.workers)
    _print_files(sorted(path for path in options.output.iterdir() if path.is_file()))


def _evaluation_folder(checkpoint: Path) -> Path:
    """Beside the run; shipped models lie where one should not write."""
    from flt_mol import resources

    if resources.folder("models") in checkpoint.parents:
        return Path("runs") / f"{checkpoint.parent.name}-evaluation"
    return checkpoint.parent / "evaluation"


def _print_files(files: Sequence[Path]) -> None:
    print("written:")
    for file in files:
        print(f"  {file}")


if __name__ == "__main__":
    sys.exit(main())
