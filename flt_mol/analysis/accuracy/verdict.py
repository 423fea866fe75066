"""Whether the numbers say what is claimed, computed from the results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flt_mol.analysis.accuracy.table import NAMES, Entry, Spread

__all__ = ["Claim", "Finding", "findings", "show"]

SEEDS = 5
_SLACK = 1.02  # of weights that count as equal


class Claim(NamedTuple):
    """What ours is to reach.

    Attributes:
        ours: name of the row.
        rivals: rows of SchNet; for each target the best of them on `split` counts.
        exact: the row of exact attention with images.
        at_most: target → ratio to `exact` on `split`.
        split: where ratios are taken.
        others: further splits, on at least `wins` of which ours is to be ahead of SchNet.
        wins: see there.
    """

    ours: str = "ours"
    rivals: tuple[str, ...] = ("schnet", "schnet_packaged")
    exact: str = "exact_images"
    at_most: Mapping[str, float] = {"energy": 0.85, "energy_initial": 0.5}
    split: str = "val_id"
    others: tuple[str, ...] = ("val_ood_ads", "val_ood_cat", "val_ood_both")
    wins: int = 2


class Finding(NamedTuple):
    """One line of the verdict.

    Attributes:
        text: what is claimed, with numbers.
        holds: whether it does; None where results are missing.
    """

    text: str
    holds: bool | None


def findings(entries: Sequence[Entry], claim: Claim | None = None) -> list[Finding]:
    """The claim, point by point. Missing results are findings of their own, never left out."""
    claim = Claim() if claim is None else claim
    by_name = {entry.name: entry for entry in entries}
    wanted = (claim.ours, *claim.rivals, claim.exact)
    found = [_seeds(by_name.get(name), name) for name in wanted]
    ours = by_name.get(claim.ours)
    chosen = []
    for target, bound in claim.at_most.items():
        rival = _best([by_name[name] for name in claim.rivals if name in by_name], claim, target)
        found.append(_ahead(ours, rival, claim.split, target))
        found.append(_ahead_elsewhere(ours, rival, claim, target))
        found.append(_ratio(ours, by_name.get(claim.exact), claim.split, target, bound))
        if rival is not None and rival not in chosen:
            chosen.append(rival)
    for rival in chosen:
        found.append(_time(ours, rival))
        found.append(_weights(ours, rival))
    return found


def show(found: Sequence[Finding]) -> str:
    """As a list, and at its end whether all holds.

    Example:
        >>> print(show([Finding("A before B", True), Finding("B before C", None)]))
        - yes: A before B
        - unknown: B before C
        <BLANKLINE>
        Verdict: unknown, results are missing.
    """
    words = {True: "yes", False: "**no**", None: "unknown"}
    lines = [f"- {words[finding.holds]}: {finding.text}" for finding in found]
    held = [finding.holds for finding in found]
    if False in held:
        last = f"not reached, {held.count(False)} of {len(held)} points fail"
        last += f", {held.count(None)} unknown." if None in held else "."
    else:
        last = "unknown, results are missing." if None in held else "reached."
    return "\n".join([*lines, "", f"Verdict: {last}"])


def _seeds(entry: Entry | None, name: str) -> Finding:
    count = 0 if entry is None else len(entry.records)
    text = f"n = {count} of {SEEDS} seeds for '{name}'"
    return Finding(text, True if count >= SEEDS else None)


def _best(rivals: Sequence[Entry], claim: Claim, target: str) -> Entry | None:
    errors = [(error.mean, i) for i, entry in enumerate(rivals)
              if (error := entry.error(claim.split, target)) is not None]  # fmt: skip
    return rivals[min(errors)[1]] if errors else None


def _error(entry: Entry | None, split: str, target: str) -> Spread | None:
    return None if entry is None else entry.error(split, target)


def _ahead(ours: Entry | None, rival: Entry | None, split: str, target: str) -> Finding:
    label = NAMES.get(target, target)
    mine, theirs = _error(ours, split, target), _error(rival, split, target)
    if mine is None or theirs is None or rival is None:
        return Finding(f"{label}: lower MAE than SchNet on {split}", None)
    text = (
        f"{label}: lower MAE than SchNet on {split}: {mine.show(4)} against {theirs.show(4)} "
        f"('{rival.name}'), {100 * (mine.mean / theirs.mean - 1):+.1f} %"
    )
    return Finding(text, mine.mean < theirs.mean)


def _ahead_elsewhere(ours: Entry | None, rival: Entry | None, claim: Claim, target: str) -> Finding:
    label = NAMES.get(target, target)
    parts, wins, known = [], 0, 0
    for split in claim.others:
        mine, theirs = _error(ours, split, target), _error(rival, split, target)
        if mine is None or theirs is None:
            parts.append(f"{split} unknown")
            continue
        known += 1
        wins += mine.mean < theirs.mean
        parts.append(f"{split} {100 * (mine.mean / theirs.mean - 1):+.1f} %")
    text = f"{label}: ahead of SchNet on at least {claim.wins} other splits: {wins}"
    text += f" ({', '.join(parts)})"
    if wins >= claim.wins:
        return Finding(text, True)
    possible = wins + len(claim.others) - known >= claim.wins
    return Finding(text, None if possible else False)


def _ratio(
    ours: Entry | None, other: Entry | None, split: str, target: str, bound: float
) -> Finding:
    text = (
        f"{NAMES.get(target, target)}: at most {bound:g} × exact attention with images on {split}"
    )
    mine, theirs = _error(ours, split, target), _error(other, split, target)
    if mine is None or theirs is None:
        return Finding(text, None)
    ratio = mine.mean / theirs.mean
    return Finding(f"{text}: {ratio:.3f}", ratio <= bound)


def _time(ours: Entry | None, rival: Entry) -> Finding:
    text = f"at most the time per epoch of '{rival.name}'"
    mine = None if ours is None else ours.seconds()
    theirs = rival.seconds()
    if mine is None or theirs is None:
        return Finding(text, None)
    return Finding(f"{text}: {mine.show(1)} against {theirs.show(1)} s", mine.mean <= theirs.mean)


def _weights(ours: Entry | None, rival: Entry) -> Finding:
    text = f"no more weights than '{rival.name}' (2 % are let pass)"
    mine = None if ours is None else ours.weights()
    theirs = rival.weights()
    if mine is None or theirs is None:
        return Finding(text, None)
    return Finding(f"{text}: {mine:,} against {theirs:,}", mine <= _SLACK * theirs)
