"""Downloads killed at random moments, and whether another run then makes the same files."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import random
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from flt_mol.data.remote.download import download
from flt_mol.testing.flaky_server import FlakyServer, Reply, serving

__all__ = ["Killed", "kill_downloads"]

_SPLITS = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both", "test_id")
_PIECE = 2**12
_NOISE = 16  # one byte in so many is random: about what gzip makes of stored graphs
_URL = "http://127.0.0.1/set.tar.gz"


@dataclass(frozen=True)
class Killed:
    """One run that was killed, and the one after it.

    Args:
        seconds: after which it was killed.
        left: what it had done.
        received: bytes that the next run fetched.
        identical: whether the files are then those of an undisturbed run.
    """

    seconds: float
    left: str
    received: int
    identical: bool


def kill_downloads(
    folder: Path, *, kills: int = 20, seed: int = 0, size: int = 2**23, rate: float = 6e6
) -> list[Killed]:
    """Kill (SIGKILL) a download again and again, each time in a new folder, and run it to the end.

    The server is slow and cuts connections at random. Moments are spread over the time that an
    undisturbed run takes, unpacking included; one that comes too late is drawn again.

    Args:
        folder: an empty one to work in.
        kills: how many.
        seed: of contents, cuts and moments.
        size: bytes of each of six files.
        rate: bytes per second of the server.
    """
    rng = random.Random(seed)
    recipe_folder, packed = _publish(folder / "recipe", rng, size)
    with serving(FlakyServer({"set.tar.gz": packed}, _cuts(rng, len(packed)), rate)) as server:
        work = partial(_download, str(recipe_folder), server.url)
        _run(work, folder / "warm")
        seconds, _, _ = _run(work, folder / "undisturbed")
        expected = contents(folder / "undisturbed")
        rows: list[Killed] = []
        while len(rows) < kills:
            to = folder / f"killed{len(rows)}"
            after, killed, _ = _run(work, to, kill_after=rng.random() * seconds)
            if killed:
                left = _left(to, len(packed))
                _, _, received = _run(work, to)
                rows.append(Killed(after, left, received, contents(to) == expected))
            else:
                to.rename(folder / f"late{len(list(folder.glob('late*')))}")
    return rows


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file in a folder, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _publish(folder: Path, rng: random.Random, size: int) -> tuple[Path, bytes]:
    """A recipe with six splits, and their archive."""
    splits: dict[str, Any] = {}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for split in _SPLITS:
            pieces = range(size // (_PIECE * _NOISE) + 1)
            data = b"".join(rng.randbytes(_PIECE) + bytes(_PIECE * (_NOISE - 1)) for _ in pieces)
            data = data[:size]
            info = tarfile.TarInfo(f"set/all/{split}/data.lmdb")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            splits[split] = {"file": info.name, "bytes": len(data), "md5": md5}
    packed = stream.getvalue()
    md5 = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    archive = {"url": _URL, "bytes": len(packed), "md5": md5}
    folder.mkdir(parents=True)
    text = yaml.safe_dump({"name": "set", "archive": archive, "splits": splits}, sort_keys=False)
    (folder / "dataset.yaml").write_text(text, encoding="utf-8")
    return folder, packed


def _cuts(rng: random.Random, size: int) -> Iterator[Reply]:
    """Connections of which most are cut at random."""
    while True:
        yield Reply(drop_after=rng.randrange(1, size))


def _download(recipe_folder: str, url: str, to: str, results: Any) -> None:
    done = download(Path(recipe_folder), to=to, base_url=url, wait=0)
    results.send(done.received)


def _run(work: Any, to: Path, kill_after: float | None = None) -> tuple[float, bool, int]:
    """Seconds, whether it was killed, and bytes received if not; in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(str(to), sender))
    begin = time.perf_counter()
    process.start()
    process.join(kill_after)
    process.kill()
    process.join()
    seconds = time.perf_counter() - begin
    if process.exitcode == -9:
        return seconds, True, 0
    if process.exitcode != 0:
        raise RuntimeError(f"the download into {to} failed; its message is above")
    received: int = receiver.recv()
    return seconds, False, received


def _left(folder: Path, total: int) -> str:
    """What lies in the folder, in words."""
    part, archive = folder / "set.tar.gz.part", folder / "set.tar.gz"
    whole = len(list(folder.rglob("data.lmdb")))
    if archive.exists():
        return f"fetched, {whole} of {len(_SPLITS)} unpacked"
    if part.exists():
        return f"{part.stat().st_size / total:.0%} fetched"
    return "nothing"
