"""Runs cases in children that are started anew when one dies, and judges what each file did."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing.cases import Case, made
from fuzzing.sound import SOUND

__all__ = ["FAULT", "Child", "Outcome", "judged", "run", "table"]

FAULT = "fault"
VERDICTS = ("records", "records + warning", "ValueError", FAULT)
SECONDS = 120.0  # for one file, on a busy machine; see CPU_SECONDS
_START = 120.0  # for a child to begin
_FILES = 400  # that one child reads


@dataclass(frozen=True)
class Outcome:
    """What a case did: the verdict, and of a fault what it was."""

    case: Case
    verdict: str
    reason: str = ""


class Child:
    """A process that reads files; see :mod:`fuzzing.reader`."""

    def __init__(self, folder: Path) -> None:
        tests = Path(__file__).parents[1]
        paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        self.log = (folder / "log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "fuzzing.reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.files = 0
        if self._line(_START) != b"ready\n":
            raise RuntimeError(f"the reader does not start: {self._last_words()}")

    def _line(self, seconds: float) -> bytes | None:
        """The next line; empty if the child died, None if it took too long."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        return self.process.stdout.readline()

    def examine(self, path: Path) -> dict[str, Any]:
        """What :func:`fuzzing.reader.examine` says, or the fault that ended the child."""
        assert self.process.stdin is not None
        self.files += 1
        self.process.stdin.write(json.dumps(str(path)).encode() + b"\n")
        self.process.stdin.flush()
        line = self._line(SECONDS)
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if line is None:
            self.close()
            return {"fault": f"hang: more than {SECONDS:g} s"}
        code = self.process.wait()
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return {"fault": f"crash: {name} {self._last_words()}"}

    def _last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-300:].decode(errors="replace").replace("\n", " | ")

    @property
    def usable(self) -> bool:
        """Whether it lives, and is not too old."""
        return self.process.poll() is None and self.files < _FILES

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
        self.log.close()


def run(cases: Iterable[Case], keep: Path | None = None) -> Iterator[Outcome]:
    """Make, read and judge each case, one after the other; of each kind the sound file first.

    Args:
        cases: what to try.
        keep: folder that gets the files of faults.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        judge = _Judge(Path(name))
        try:
            for case in cases:
                if case.kind in SOUND and case.kind not in judge.usual:
                    yield judge.look(Case(case.kind, "none", 0), keep)
                yield judge.look(case, keep)
        finally:
            judge.close()


class _Judge:
    """Makes files in a folder, and holds the child that reads them.

    Attributes:
        usual: for each kind, what reading its sound file warns of.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = folder / "canary"
        self.home = folder / "home"
        self.home.mkdir()
        self.usual: dict[str, set[str]] = {}
        self.number = 0
        self.child: Child | None = None

    def look(self, case: Case, keep: Path | None) -> Outcome:
        """Make a case, have it read, and judge."""
        self.number += 1
        folder = self.folder / f"{self.number}"
        folder.mkdir()
        path, expected = made(case, folder, self.canary)
        before = _state(folder)
        answer = self.reader().examine(path)
        if self.canary.exists():
            self.canary.unlink()
            answer["fault"] = "the canary was touched: code ran"
        elif not answer["fault"] and _state(folder) != before:
            answer["fault"] = "files were changed or left behind"
        if case.mutation == "none":
            self.usual[case.kind] = _warnings(answer, path)
        outcome = judged(case, path, expected, answer, self.usual.get(case.kind, set()))
        if keep is not None and outcome.verdict == FAULT:
            _copy(folder, keep / str(case).replace("/", "_"))
        shutil.rmtree(folder)
        return outcome

    def reader(self) -> Child:
        """A child that lives."""
        if self.child is None or not self.child.usable:
            self.close()
            self.child = Child(self.home)
        return self.child

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.close()


def judged(
    case: Case, path: Path, expected: int | None, answer: dict[str, Any], usual: set[str]
) -> Outcome:
    if answer["fault"]:
        return Outcome(case, FAULT, answer["fault"])
    names = {str(path), *(os.path.realpath(link) for link in path.parent.rglob("*"))}
    for error in answer["errors"]:
        if not any(name in error for name in names):
            return Outcome(case, FAULT, f"an error that does not name the file: {error:.300}")
        if "MemoryError" in error or "llocate" in error:
            return Outcome(case, FAULT, f"memory: {error:.300}")
    if case.mutation == "none" and (answer["errors"] or answer["count"] != expected):
        return Outcome(case, FAULT, f"the sound file is not read: {answer!r:.300}")
    if answer["errors"]:
        return Outcome(case, "ValueError")
    if _warnings(answer, path) - usual:
        return Outcome(case, "records + warning")
    if expected is not None and answer["count"] != expected:
        reason = f"{answer['count']} records of {expected} without a word of warning"
        return Outcome(case, FAULT, reason)
    return Outcome(case, "records")


def _warnings(answer: dict[str, Any], path: Path) -> set[str]:
    return {text.replace(str(path), "FILE") for text in answer.get("warnings", ())}


def _copy(folder: Path, target: Path) -> None:
    """What is in a folder, without what is not a file, or is one of gigabytes."""

    def large(where: str, names: list[str]) -> list[str]:
        found = {name: Path(where, name).lstat() for name in names}
        return [n for n, s in found.items() if not _plain(s.st_mode) or s.st_size > 1 << 28]

    shutil.copytree(folder, target, symlinks=True, ignore=large, dirs_exist_ok=True)


def _plain(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _state(folder: Path) -> dict[str, str]:
    """Names, kinds and contents of what is in a folder."""
    state = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 28:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        state[str(path)] = f"{status.st_mode} {status.st_size} {status.st_mtime_ns} {content}"
    return state


def table(outcomes: Iterable[Outcome]) -> str:
    """Kind × verdict, in Markdown."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.case.kind, Counter())[outcome.verdict] += 1
    total: Counter[str] = sum(counts.values(), Counter())
    lines = [
        f"| {' | '.join(('kind', 'files', *VERDICTS))} |",
        f"|{'---|' * (len(VERDICTS) + 2)}",
    ]
    for kind, row in [*sorted(counts.items()), ("all", total)]:
        cells = (kind, row.total(), *(row[verdict] for verdict in VERDICTS))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
