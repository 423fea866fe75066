"""Seeded damage: each mutation takes a sound file and gives other bytes, or another kind of thing.

A mutation gets the sound file and a `random.Random`, and returns the new bytes and how many
records may be expected of them: those of the sound file, or None where no number is known.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from random import Random

from fuzzing.sound import SOUND, Sound, lmdb_bytes, sound

__all__ = ["BYTES", "FOREIGN", "LMDB", "RECORDS", "TEXT", "Mutation"]

Mutation = Callable[[Sound, Random], tuple[bytes, int | None]]
PAGE = 4096
_EXTREMES = (0, 1, 2, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)


def flipped(data: bytes, rng: Random, start: int = 0, stop: int | None = None) -> bytes:
    """One to eight bits flipped between start and stop."""
    changed = bytearray(data)
    stop = len(data) if stop is None else min(stop, len(data))
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: Random) -> bytes:
    """The first part."""
    return data[: rng.randrange(len(data))]


def overwritten(data: bytes, rng: Random) -> bytes:
    """Random bytes over up to 64 bytes."""
    at, size = rng.randrange(len(data)), rng.choice((1, 2, 4, 16, 64))
    return (data[:at] + rng.randbytes(size) + data[at + size :])[: len(data)]


def resized(data: bytes, rng: Random) -> bytes:
    """What could be a size, an offset or a count set to a number at the edge, or moved by one."""
    form = rng.choice(("<H", "<I", "<Q", ">H", ">I", ">Q"))
    size = struct.calcsize(form)
    if len(data) < size:
        return rng.randbytes(size)
    at = rng.randrange(len(data) - size + 1) // 2 * 2
    old = struct.unpack_from(form, data, at)[0]
    new = rng.choice((*_EXTREMES, old + 1, old - 1, old * 2, old // 2)) % (1 << 8 * size)
    return data[:at] + struct.pack(form, new) + data[at + size :]


def _block(data: bytes, rng: Random) -> tuple[int, int]:
    size = min(rng.choice((16, 256, 512, PAGE, PAGE)), max(len(data) // 3, 1))
    return rng.randrange(len(data)) // size * size, size


def zeroed(data: bytes, rng: Random) -> bytes:
    """A hole."""
    at, size = _block(data, rng)
    return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def swapped(data: bytes, rng: Random) -> bytes:
    """Two blocks in each other's place."""
    a, size = _block(data, rng)
    b = rng.randrange(len(data)) // size * size
    changed = bytearray(data)
    changed[a : a + size], changed[b : b + size] = data[b : b + size], data[a : a + size]
    return bytes(changed[: len(data)])


def repeated(data: bytes, rng: Random) -> bytes:
    """A block over another one, or in between."""
    a, size = _block(data, rng)
    b = rng.randrange(len(data)) // size * size
    after = b + size if rng.random() < 0.5 else b
    return data[:b] + data[a : a + size] + data[after:]


def lost(data: bytes, rng: Random) -> bytes:
    """A block left out."""
    at, size = _block(data, rng)
    return data[:at] + data[at + size :]


def grown(data: bytes, rng: Random) -> bytes:
    """Something behind the end."""
    return data + rng.choice((b"\0", b"\n", b"\0" * PAGE, rng.randbytes(100), data[:PAGE], data))


ANY = {f.__name__: f for f in (flipped, cut, overwritten, resized, zeroed, swapped)}
ANY |= {f.__name__: f for f in (repeated, lost, grown)}


def _of_bytes(change: Callable[[bytes, Random], bytes]) -> Mutation:
    def mutate(given: Sound, rng: Random) -> tuple[bytes, int | None]:
        data = change(given.data, rng)
        return data, _expected(given, data)

    return mutate


def _expected(given: Sound, data: bytes) -> int | None:
    """The records of the sound file; of texts that hold no count, what is in them."""
    if given.suffix == ".extxyz":
        return _frames(data) or given.count
    if given.suffix == ".cif":
        return len(re.findall(rb"^data_", data, re.MULTILINE)) or given.count
    return given.count


def _frames(data: bytes) -> int | None:
    """How many frames of extended XYZ these are, None if there is anything else."""
    lines, count = data.split(b"\n"), 0
    while len(lines) > 1:
        head = lines[0].strip()
        if not head.isdigit() or len(lines) < int(head) + 2:
            return None
        del lines[: int(head) + 2]
        count += 1
    return count


BYTES: dict[str, Mutation] = {name: _of_bytes(change) for name, change in ANY.items()}
BYTES["head flipped"] = _of_bytes(lambda data, rng: flipped(data, rng, 0, 128))


def _pages(data: bytes, *kinds: int) -> list[int]:
    """Where pages of these kinds (branch 1, leaf 2, overflow 4, meta 8) begin."""
    headers = ((at, struct.unpack_from("<Q2xH", data, at)) for at in range(0, len(data), PAGE))
    return [at for at, (number, flags) in headers if number == at // PAGE and flags in kinds]


def _in_page(data: bytes, rng: Random, first: int, last: int, *kinds: int) -> bytes:
    """A few bits or one number changed between two offsets of a page of one of these kinds."""
    pages = _pages(data, *kinds)
    if not pages:
        return flipped(data, rng)
    at = rng.choice(pages)
    part = data[at + first : at + last]
    change = rng.choice((flipped, resized, overwritten, flipped))
    return data[: at + first] + change(part, rng)[: len(part)] + data[at + last :]


def _nodes(data: bytes, rng: Random) -> bytes:
    """Damage in the header and the key of one node of a tree page."""
    at = rng.choice(_pages(data, 1, 2))
    lower = struct.unpack_from("<H", data, at + 12)[0]
    if lower <= 16:
        return flipped(data, rng, at, at + PAGE)
    index = rng.randrange((lower - 16) // 2)
    node = at + struct.unpack_from("<H", data, at + 16 + 2 * index)[0]
    return flipped(data, rng, node, node + 12)


def _old_meta(data: bytes, rng: Random) -> bytes:
    """One meta page over the other, or both exchanged."""
    first, second, rest = data[:PAGE], data[PAGE : 2 * PAGE], data[2 * PAGE :]
    pairs = (first + first, second + second, second + first)
    return rng.choice(pairs) + rest


LMDB: dict[str, Mutation] = {
    "meta": _of_bytes(lambda data, rng: _in_page(data, rng, 0, 152, 8)),
    "meta exchanged": _of_bytes(_old_meta),
    "tree header": _of_bytes(lambda data, rng: _in_page(data, rng, 0, 64, 1, 2)),
    "tree body": _of_bytes(lambda data, rng: _in_page(data, rng, 64, PAGE, 1, 2)),
    "node": _of_bytes(_nodes),
    "large record": _of_bytes(lambda data, rng: _in_page(data, rng, 0, PAGE, 4)),
    "cut at a page": _of_bytes(
        lambda data, rng: data[: rng.randrange(1, len(data) // PAGE) * PAGE]
    ),
}


def _in_record(change: Callable[[bytes, Random], bytes], inside: bool) -> Mutation:
    """One value of an LMDB file changed, or what zlib made it from; the pages stay sound."""

    def mutate(given: Sound, rng: Random) -> tuple[bytes, int | None]:
        assert given.values is not None
        values = dict(given.values)
        key = rng.choice(sorted(values))
        value = values[key]
        if inside and value[:1] == b"x":
            value = zlib.compress(change(zlib.decompress(value), rng))
        else:
            value = change(value, rng)
        values[key] = value
        return lmdb_bytes(values), given.count

    return mutate


RECORDS: dict[str, Mutation] = {
    f"record {name}{' inside' * inside}": _in_record(change, inside)
    for name, change in ANY.items()
    for inside in (False, True)
}


def _line(change: Callable[[list[bytes], int, Random], None]) -> Mutation:
    def mutate(given: Sound, rng: Random) -> tuple[bytes, int | None]:
        lines = given.data.split(b"\n")
        change(lines, rng.randrange(len(lines)), rng)
        data = b"\n".join(lines)
        return data, _expected(given, data)

    return mutate


def _number(lines: list[bytes], at: int, rng: Random) -> None:
    found = list(re.finditer(rb"-?\d+\.?\d*", lines[at]))
    if found:
        new = rng.choice((b"nan", b"inf", b"1e999", b"-1", b"0", b"9" * 30, b"x", b"", b"1e400"))
        where = rng.choice(found)
        lines[at] = lines[at][: where.start()] + new + lines[at][where.end() :]


def _text(lines: list[bytes], at: int, rng: Random) -> None:
    new = rng.choice((b"\xff\xfe", b"\0", b"\r", b'"', b"=", b"{", b"\x1a", b"\xe2\x80\xa8", b"#"))
    place = rng.randrange(len(lines[at]) + 1)
    lines[at] = lines[at][:place] + new + lines[at][place:]


TEXT: dict[str, Mutation] = {
    "line lost": _line(lambda lines, at, _: lines.pop(at) and None),
    "line twice": _line(lambda lines, at, _: lines.insert(at, lines[at])),
    "line blank": _line(lambda lines, at, _: lines.__setitem__(at, b"")),
    "number": _line(_number),
    "character": _line(_text),
}


def _tar(data: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("data.lmdb")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _zip(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(zipfile.ZipInfo("data.lmdb"), data)
    return stream.getvalue()


def _wrapped(wrap: Callable[[bytes], bytes]) -> Mutation:
    return lambda given, rng: (wrap(given.data), None)


def _plain(content: bytes) -> Mutation:
    return lambda given, rng: (content, None)


def _other(given: Sound, rng: Random) -> tuple[bytes, int | None]:
    return sound(rng.choice(sorted(SOUND))).data, None


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
FOREIGN: dict[str, Mutation] = {
    "other kind": _other,
    "gzip": _wrapped(lambda data: gzip.compress(data, mtime=0)),
    "tar": _wrapped(_tar),
    "zip": _wrapped(_zip),
    "empty": _plain(b""),
    "zeros": _plain(bytes(3 * PAGE)),
    "web page": _plain(b"<!doctype html><html><body>404</body></html>"),
    "git-lfs pointer": _plain(_POINTER),
    "text": _plain(b"sid,y_relaxed\n1,-0.5\n"),
    "png": _plain(b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "noise": lambda given, rng: (rng.randbytes(rng.choice((1, 100, PAGE, 3 * PAGE))), None),
    "nested json": _plain(b"[" * 100_000),
}
