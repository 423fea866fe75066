"""Lines of results: what was measured, under which settings; measuring what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.speed.points import Setting, run_point

__all__ = ["BENCHES", "Record", "latest", "measured"]

BENCHES: dict[str, str] = {
    name: f"flt_mol.analysis.speed.{name}:measure"
    for name in ("lengths", "training_step", "parts", "one_system")
}


class Record(NamedTuple):
    """One point, measured or stopped.

    Attributes:
        point: arguments of the function that measured.
        setting: threads, allocator and limit.
        result: what it returned; None if it was stopped.
        stopped: why there is no result, or None.
        machine: processor and versions; empty if it was stopped.
        environment: variables that allocators and threads look at.
    """

    point: dict[str, Any]
    setting: Setting
    result: dict[str, Any] | None
    stopped: str | None
    machine: dict[str, Any]
    environment: dict[str, str]


def measured(
    bench: str,
    points: Iterable[Mapping[str, Any]],
    settings: Iterable[Setting],
    results: Results,
    *,
    missing: bool = False,
    size: str | None = None,
) -> Iterator[Record]:
    """Measure points, each in a fresh process, and append a line for each as soon as it is done.

    Args:
        bench: a name in `BENCHES`.
        points: arguments of its function.
        settings: to measure all points under.
        results: where lines go.
        missing: whether points that have a line are left out.
        size: an argument that memory grows with, in ascending order: once a point is stopped, those
            that differ in it alone are not tried.
    """
    points = list(points)
    for setting in settings:
        known = {_key(record) for record in latest(results, bench)} if missing else set()
        beyond = set[str]()
        for point in points:
            record = Record(dict(point), setting, None, None, {}, {})
            if _key(record) in known:
                continue
            others = json.dumps({name: value for name, value in point.items() if name != size})
            if size is not None and others in beyond:
                answer: dict[str, Any] = {"stopped": "not tried: a smaller one was stopped"}
            else:
                answer = run_point(BENCHES[bench], point, setting)
            line = {"bench": bench, "point": dict(point), "setting": setting._asdict(), **answer}
            results.append(line)
            if "stopped" in answer:
                beyond.add(others)
            yield _record(line)


def latest(results: Results, bench: str) -> list[Record]:
    """The last line of each point and setting, whatever its rounds, in order of their first."""
    found: dict[str, Record] = {}
    for line in results.read():
        if line.get("bench") == bench:
            record = _record(line)
            found[_key(record)] = record
    return list(found.values())


def _record(line: Mapping[str, Any]) -> Record:
    return Record(
        line["point"],
        Setting(**line["setting"]),
        line.get("result"),
        line.get("stopped"),
        line.get("machine", {}),
        line.get("environment", {}),
    )


def _key(record: Record) -> str:
    """What a later line replaces; how many rounds were taken makes no other point of it."""
    point = {name: value for name, value in record.point.items() if name != "rounds"}
    return json.dumps([point, list(record.setting)], sort_keys=True)
