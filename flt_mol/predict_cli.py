"""What `flt-mol predict` takes besides a checkpoint, and what it prints."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flt_mol.outputs import counted, printable, say
from flt_mol.structures import Structures

if TYPE_CHECKING:
    from flt_mol.prediction.table import Prediction
    from flt_mol.training.tag_rules import TagRule

__all__ = ["Tagger", "add_predict_options", "lines", "summary", "tagger"]

_SHOWN = 8  # kinds of tagged structures


def add_predict_options(parser: argparse.ArgumentParser) -> None:
    """Files, output, ensemble, and tagging."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="of structures: LMDB, and whatever ASE reads"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write, in place of one of that name: .csv, .json, or .extxyz for the "
        "structures with energy_predicted, eV; a summary is printed (default: print energies)",
    )
    parser.add_argument(
        "--ensemble",
        nargs="+",
        action="extend",
        default=[],
        metavar="CHECKPOINT",
        help="further members: energies are the mean, with the spread (standard deviation, eV)",
    )
    parser.add_argument(
        "--tag-slab",
        action="store_true",
        help="tag structures whose tags are all 0, as POSCAR and cif leave them, or the numbers "
        "of layers, as ase.build sets them",
    )
    parser.add_argument(
        "--adsorbate",
        type=_adsorbate,
        metavar="WHAT",
        help="with --tag-slab: a formula (CO), atoms counted from 0 (12,13), or none "
        "(default: H, C, N and O on top of the slab)",
    )
    parser.add_argument(
        "--surface",
        type=_surface,
        metavar="RULE",
        help="with --tag-slab: oc20, half of the layers, as emt_adsorption has it, or a number of "
        "layers (default: the rule of the model's training data, or oc20 where that is not known)",
    )


class Tagger:
    """Tags slabs, and keeps what to show of them.

    Args:
        adsorbate: as of `flt_mol.data.tag_slab`.
        surface: as of `flt_mol.data.tag_slab`; None takes that of `rule`.
        rule: of the data that the model was trained on, where it is known.
    """

    def __init__(
        self,
        adsorbate: str | list[int] | None,
        surface: str | int | None,
        rule: TagRule | None,
    ) -> None:
        from flt_mol.training.tag_rules import DEFAULT

        self.adsorbate = adsorbate
        self.given = surface is not None
        self.rule = rule
        self.surface = surface or (DEFAULT if rule is None else rule.surface)
        self.untagged = 0
        self.shown: list[str] = []

    def __call__(self, structures: Structures) -> Structures:
        """The structures with tags."""
        from flt_mol.data.slabs import tag_structures

        tagged = tag_structures(structures, self.adsorbate, surface=self.surface)
        self.untagged += not structures.tags.any()
        self.shown += [_counts(one) for one in tagged]
        return tagged

    def tell(self) -> None:
        """Say which rule was taken for the user, or that the one given is not the model's."""
        if not self.untagged:
            return
        used = f"tagged by the rule '{self.surface}'"
        if not self.given and self.rule is not None:
            text = f"{used}, that of {self.rule.data}, which the model {self.rule.bond}"
            say(f"flt-mol: {text}", sys.stderr)
        elif not self.given:
            warnings.warn(
                f"{used}: by which rule the model's training data were tagged is not known; give "
                "it with --surface (or in the run, with data.tag_rule)",
                UserWarning,
                stacklevel=2,
            )
        elif self.rule is not None and self.rule.surface != self.surface:
            warnings.warn(
                f"{used}, and the model {self.rule.bond} {self.rule.data}, whose tags are by the "
                f"rule '{self.rule.surface}': energies may be far off; leave --surface out to tag "
                "by that",
                UserWarning,
                stacklevel=2,
            )


def tagger(options: argparse.Namespace) -> Tagger | None:
    """What tags the structures; None where that was not asked for.

    Raises:
        ValueError: --adsorbate or --surface without --tag-slab; no such checkpoint; members of an
            ensemble whose data were tagged by different rules, and no --surface.
    """
    if options.tag_slab:
        from flt_mol.training.tag_rules import common_rule, tag_rules

        rules = tag_rules([options.checkpoint, *options.ensemble])
        if options.surface is not None:  # it counts; of several others, one that is not it is told
            rules = dict(sorted(rules.items(), key=lambda i: i[1].surface == options.surface)[:1])
        return Tagger(options.adsorbate, options.surface, common_rule(rules))
    for name in ("adsorbate", "surface"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} says how to tag: give --tag-slab, too")
    return None


def lines(predictions: Sequence[Prediction], prepared: Tagger | None) -> Iterator[str]:
    """A line for each structure."""
    names = [printable(p.name) for p in predictions]
    width = max(map(len, names), default=0)
    notes = [""] * len(names) if prepared is None else [f"  {text}" for text in prepared.shown]
    for name, p, note in zip(names, predictions, notes, strict=True):
        spread = "" if p.spread is None else f" ± {p.spread:.6f}"
        yield f"{name:<{width}}  {p.energy:12.6f}{spread} eV{note}"


def summary(predictions: Sequence[Prediction], prepared: Tagger | None) -> Iterator[str]:
    """What is printed where the energies themselves go to a file."""
    if predictions:
        energies = np.array([p.energy for p in predictions])
        text = counted(len(energies), "structure")
        if len(energies) > 1:
            low, high, middle = energies.min(), energies.max(), np.median(energies)
            yield f"{text}: {low:.3f} to {high:.3f} eV, median {middle:.3f}"
        else:
            yield f"{text}: {energies[0]:.3f} eV"
        spreads = [p.spread for p in predictions if p.spread is not None]
        if spreads:
            middle, high = np.median(spreads), max(spreads)
            yield f"spread of the members: median {middle:.3f} eV, up to {high:.3f}"
    kinds = Counter([] if prepared is None else prepared.shown).most_common()
    for kind, count in kinds[:_SHOWN]:
        yield f"  {count} × {kind}"
    if len(kinds) > _SHOWN:
        yield f"  and {len(kinds) - _SHOWN} more kinds"


def _counts(one: Structures) -> str:
    from ase.formula import Formula
    from ase.symbols import Symbols

    below, surface, adsorbate = (int((one.tags == tag).sum()) for tag in range(3))
    there = Symbols(one.atomic_numbers[one.tags == 2].cpu().numpy())
    formula = Formula(str(there)).format("hill") if adsorbate else "none"
    return f"below {below}, surface {surface}, adsorbate {formula}"


def _adsorbate(text: str) -> str | list[int]:
    numbers = text.split(",")
    return [int(n) for n in numbers] if all(n.strip().isdecimal() for n in numbers) else text


def _surface(text: str) -> str | int:
    from flt_mol.data.slabs.surface import parse_rule

    try:
        return parse_rule(text, "")
    except ValueError:
        told = f"'{text}' is not oc20, half or a number of layers"
        raise argparse.ArgumentTypeError(told) from None
