"""Whether the numbers say what is claimed, computed from the results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flt_mol.analysis.accuracy.table import NAMES, Entry, Spread
from flt_mol.analysis.accuracy.times import Clock

__all__ = ["Claim", "Finding", "findings", "show"]

SEEDS = 5
MEASURED = "the exact attention that the bounds were set by"
STRONGEST = "the strongest exact attention measured"
_SLACK = 1.02  # of weights that count as equal


class Claim(NamedTuple):
    """What ours is to reach.

    Attributes:
        ours: name of the row.
        rivals: rows of SchNet; for each target the best of them on `split` counts.
        exact: rows of exact attention with images; for each target the best of them on `split`
            counts for the second verdict.
        measured: the one of `exact` that the bounds were set by, for the first verdict.
        at_most: target → ratio to exact attention on `split`.
        split: where ratios are taken.
        others: further splits, on at least `wins` of which ours is to be ahead of SchNet.
        wins: see there.
    """

    ours: str = "ours"
    rivals: tuple[str, ...] = ("schnet", "schnet_packaged")
    exact: tuple[str, ...] = ("exact_gaussian", "exact_images", "graphormer", "graphormer4")
    measured: str = "exact_images"
    at_most: Mapping[str, float] = {"energy": 0.85, "energy_initial": 0.5}
    split: str = "val_id"
    others: tuple[str, ...] = ("val_ood_ads", "val_ood_cat", "val_ood_both")
    wins: int = 2


class Finding(NamedTuple):
    """One line of the verdict.

    Attributes:
        text: what is claimed, with numbers.
        holds: whether it does; None where results are missing.
        scope: the verdict that it is a part of; None for all.
    """

    text: str
    holds: bool | None
    scope: str | None = None


def findings(
    entries: Sequence[Entry], claim: Claim | None = None, clock: Clock | None = None
) -> list[Finding]:
    """The claim, point by point. Missing results are findings of their own, never left out.

    Args:
        entries: all rows.
        claim: see there.
        clock: times of rows that took turns; those while training count where it has none.
    """
    claim = Claim() if claim is None else claim
    by_name = {entry.name: entry for entry in entries}
    found = [_seeds(by_name.get(name), name) for name in (claim.ours, *claim.rivals)]
    for name in claim.exact:
        scope = None if name == claim.measured else STRONGEST
        found.append(_seeds(by_name.get(name), name)._replace(scope=scope))
    ours = by_name.get(claim.ours)
    chosen = []
    for target in claim.at_most:
        rival = _best(by_name, claim.rivals, claim.split, target)
        found.append(_ahead(ours, rival, claim.split, target))
        found.append(_ahead_elsewhere(ours, rival, claim, target))
        found += _beside_exact(by_name, claim, target)
        if rival is not None and rival not in chosen:
            chosen.append(rival)
    for rival in chosen:
        found.append(_time(ours, rival, clock))
        found.append(_weights(ours, rival))
    return found


def show(found: Sequence[Finding]) -> str:
    """As a list, and at its end whether all holds; a line for each scope, if there are any.

    Example:
        >>> print(show([Finding("A before B", True), Finding("B before C", None)]))
        - yes: A before B
        - unknown: B before C
        <BLANKLINE>
        Verdict: unknown, results are missing.
    """
    words = {True: "yes", False: "**no**", None: "unknown"}
    lines = [f"- {words[finding.holds]}: {finding.text}" for finding in found]
    scopes = [scope for scope in (MEASURED, STRONGEST) if scope in {each.scope for each in found}]
    verdicts = [f"Verdict: {_verdict(found)}"]
    if scopes:
        parts = {scope: [f for f in found if f.scope in (None, scope)] for scope in scopes}
        verdicts = [f"- Verdict with {scope}: {_verdict(part)}" for scope, part in parts.items()]
    return "\n".join([*lines, "", *verdicts])


def _verdict(found: Sequence[Finding]) -> str:
    held = [finding.holds for finding in found]
    if False in held:
        last = f"not reached, {held.count(False)} of {len(held)} points fail"
        return last + (f", {held.count(None)} unknown." if None in held else ".")
    return "unknown, results are missing." if None in held else "reached."


def _seeds(entry: Entry | None, name: str) -> Finding:
    count = 0 if entry is None else len(entry.records)
    text = f"n = {count} of {SEEDS} seeds for '{name}'"
    return Finding(text, True if count >= SEEDS else None)


def _best(
    by_name: Mapping[str, Entry], names: Sequence[str], split: str, target: str
) -> Entry | None:
    found = [by_name[name] for name in names if name in by_name]
    errors = [(error.mean, i) for i, entry in enumerate(found)
              if (error := entry.error(split, target)) is not None]  # fmt: skip
    return found[min(errors)[1]] if errors else None


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


def _beside_exact(by_name: Mapping[str, Entry], claim: Claim, target: str) -> list[Finding]:
    """The bound, against the row that it was set by and against the best of exact attention."""
    ours, bound = by_name.get(claim.ours), claim.at_most[target]
    best = _best(by_name, claim.exact, claim.split, target)
    found = []
    for scope, other in ((MEASURED, by_name.get(claim.measured)), (STRONGEST, best)):
        text = f"{NAMES.get(target, target)}: at most {bound:g} × {scope} on {claim.split}"
        mine, theirs = (_error(entry, claim.split, target) for entry in (ours, other))
        if ours is None or other is None or mine is None or theirs is None:
            found.append(Finding(text, None, scope))
            continue
        ratio = mine.mean / theirs.mean
        text += (
            f": {ratio:.3f} ({mine.show(4)} against {theirs.show(4)} of '{other.name}'; "
            f"{ours.weights():,} weights against {other.weights():,})"
        )
        found.append(Finding(text, ratio <= bound, scope))
    return found


def _time(ours: Entry | None, rival: Entry, clock: Clock | None) -> Finding:
    text = f"at most the time per epoch of '{rival.name}'"
    turns = None if ours is None or clock is None else clock.ratio(ours.name, rival.name)
    if turns is not None:
        return Finding(f"{text}, in turns on the same batches: {turns}", turns.median <= 1)
    mine = None if ours is None else ours.seconds()
    theirs = rival.seconds()
    if mine is None or theirs is None:
        return Finding(text, None)
    text += f", each while it was trained: {mine.show(1)} against {theirs.show(1)} s"
    return Finding(text, mine.mean <= theirs.mean)


def _weights(ours: Entry | None, rival: Entry) -> Finding:
    text = f"no more weights than '{rival.name}' (2 % are let pass)"
    mine = None if ours is None else ours.weights()
    theirs = rival.weights()
    if mine is None or theirs is None:
        return Finding(text, None)
    return Finding(f"{text}: {mine:,} against {theirs:,}", mine <= _SLACK * theirs)
