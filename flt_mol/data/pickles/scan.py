"""A quick look through a pickle for what would end the process that loads it.

`pickle` calls nothing that the table of names does not allow, but its own C code can be led into
memory that it cannot have, or so deep into itself that the stack ends: a memo index of 2³² takes
64 GB; the hash of tuples nested 10⁵ times, used as key, ends the process.

Two forms of the same look. The careful one counts what could do harm, opcode by opcode. The quick
one knows pickles that are too short for harm once their byte strings are taken out, as all records
of a few thousand atoms are: what is left of them are a few hundred bytes of opcodes.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from struct import Struct
from typing import NamedTuple

__all__ = ["Split", "scan", "split"]

_CODE = 1 << 22  # bytes of opcodes, strings apart: each may make an object of 200 bytes
_NESTING = 20_000  # opcodes that could nest values that can be keys

_NAME = 32  # a pattern for each length; compiling more takes longer than they save

_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
_NEST = frozenset(map(ord, "t\x85\x86\x87\x91Rio\x81\x92"))
_TEXTS = b"SV"
_STOP, _PUT, _LONG_PUT, _FRAME, _BYTEARRAY = b".pr\x95\x96"
_COUNTED = {
    code: {-2: 1, -3: 4, -4: 4, -5: 8}[op.arg.n]
    for code, op in _OPCODES.items()
    if op.arg is not None and op.arg.n < -1
}
_BYTES = frozenset(b"B\x8e\x96")
_LINES = {
    code: 2 if code in b"ci" else 1
    for code, op in _OPCODES.items()
    if op.arg is not None and op.arg.n == -1
}


def _fixed_length(left_out: frozenset[int]) -> list[bytes]:
    """Patterns of opcodes with nothing, or a number of bytes known beforehand, after them."""
    by_length: dict[int, bytes] = {}
    for code, op in _OPCODES.items():
        length = 0 if op.arg is None else op.arg.n
        if length >= 0 and code not in left_out:
            by_length[length] = by_length.get(length, b"") + re.escape(bytes([code]))
    return [
        b"[%b]%b" % (codes, b".{%d}" % length if length else b"+")
        for length, codes in sorted(by_length.items())
    ]


def _short_strings(code: bytes, zeros: bytes = b"") -> bytes:
    """Pattern of a string as short as a name; `zeros` are the upper bytes of its length."""
    lengths = (re.escape(bytes([n])) + zeros + (b".{%d}" % n if n else b"") for n in range(_NAME))
    return re.escape(code) + b"(?:%b)" % b"|".join(lengths)


def _tuples_of_numbers() -> bytes:
    """Pattern of tuples of up to three numbers: they hold no tuple, so they nest nothing."""
    number = rb"(?:K.|M..|J.{4}|G.{8}|[N\x88\x89])(?:\x94|q.)?+"
    return rb"%b(?:\x85|%b(?:\x86|%b\x87?+)?+)?+" % (number, number, number)


def _run(patterns: list[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"(?:%b)*+" % b"|".join(patterns), re.DOTALL)


_CAREFUL = _run([_tuples_of_numbers(), *_fixed_length(_NEST | {_STOP, _LONG_PUT})]).match
_QUICK = _run(
    [
        *_fixed_length(frozenset({_STOP, _LONG_PUT, _FRAME, ord("Q")})),
        _short_strings(b"\x8c"),
        _short_strings(b"C"),
        _short_strings(b"X", b"\0\0\0"),
        rb"c[^\n]*+\n[^\n]*+\n",
    ]
).match
_WIDTH = {_FRAME: 8, **_COUNTED}
_UNPACK = {width: Struct(f"<{kind}").unpack_from for width, kind in ((1, "B"), (4, "I"), (8, "Q"))}
_INDEX, _SIZE = Struct("<I").pack, Struct("<Q").pack


class Split(NamedTuple):
    """A harmless pickle, its byte strings apart.

    Attributes:
        code: the pickle with an index (a persistent id) in the place of each byte string.
        strings: the byte strings; those that the pickle wants as bytearray are bytearrays.
    """

    code: bytes
    strings: list[memoryview | bytearray]


def split(data: bytes | memoryview) -> Split | None:
    """A pickle without its byte strings, which are not copied; None: see what :func:`scan` says.

    Loading `code`, with `strings` for persistent ids, gives what loading `data` would give, and
    can do no harm: it keeps the limits of :func:`scan`.

    Args:
        data: bytes, or a view of bytes.

    Example:
        >>> split(pickle.dumps({"x": bytes(1000)}, protocol=4)).strings[0].nbytes
        1000
    """
    found = _cuts(data, 0)
    if found is None:
        return None
    end, cuts = found
    view = memoryview(data)
    strings: list[memoryview | bytearray] = []
    pieces: list[memoryview | bytes] = []
    kept = 0
    for at, begin, stop in cuts:
        pieces.append(view[kept:at])
        if begin < stop or view[at] != _FRAME:
            pieces.append(b"J%bQ" % _INDEX(len(strings)))
            content = view[begin:stop]
            strings.append(bytearray(content) if view[at] == _BYTEARRAY else content)
        kept = stop
    pieces.append(view[kept:end])
    code = b"".join(pieces)
    return Split(b"\x95%b%b" % (_SIZE(len(code)), code), strings)


def _cuts(data: bytes | memoryview, start: int) -> tuple[int, list[tuple[int, int, int]]] | None:
    """The quick look: where the pickle ends, and what to cut; None where a careful one is due.

    A cut is an opcode's place and where its bytes begin and end; the head of a frame has none.
    """
    at, strings, size = start, 0, len(data)
    cuts: list[tuple[int, int, int]] = []
    while True:
        at = _QUICK(data, at).end()  # type: ignore[union-attr]
        if at == size:
            return None
        code = data[at]
        if code == _STOP:
            return (at + 1, cuts) if at - start - strings < _NESTING else None
        width = _WIDTH.get(code)
        if width is None or (begin := at + 1 + width) > size:
            return None
        end = begin + _UNPACK[width](data, at + 1)[0]
        if end > size:
            return None
        if code == _FRAME:
            cuts.append((at, begin, begin))
            at = begin
            continue
        if code in _BYTES:
            cuts.append((at, begin, end))
        strings += end - at - 1
        at = end


def scan(data: bytes, start: int = 0) -> int:
    """Where the pickle that begins at `start` ends.

    Raises:
        pickle.UnpicklingError: truncated data, a byte that is no opcode, or more than a record
            of numbers needs: memo indices beyond the number of values, 4 MiB of opcodes, 20 000
            tuples (those of up to three numbers are not counted).
    """
    found = _cuts(data, start)
    return _careful(data, start) if found is None else found[0]


def _careful(data: bytes, start: int) -> int:
    at, strings, nesting = start, 0, 0
    while True:
        run = _CAREFUL(data, at) if at < len(data) else None
        if run is None or (at := run.end()) == len(data):
            raise pickle.UnpicklingError("pickle data was truncated")
        if at - start - strings > _CODE:
            raise pickle.UnpicklingError("too many values; store arrays")
        code = data[at]
        at += 1
        if code in _COUNTED:
            begin = at + _COUNTED[code]
            end = begin + int.from_bytes(data[at:begin], "little")
            strings += end - at
            at = end
        elif code in _NEST:
            nesting += 1
            if code in _LINES:
                at = _after_lines(data, at, 2)
        elif code == _LONG_PUT:
            _check_memo(int.from_bytes(data[at : at + 4], "little"), at - start - strings)
            at += 4
        elif code in _LINES:
            end = _after_lines(data, at, _LINES[code])
            if code == _PUT:
                _check_memo(int(data[at:end]), at - start - strings)
            elif code in _TEXTS:
                strings += end - at
            at = end
        elif code == _STOP:
            return at
        else:
            raise pickle.UnpicklingError(f"invalid load key, {bytes([code])!r}")
        if nesting > _NESTING:
            raise pickle.UnpicklingError(f"more than {_NESTING} tuples or calls; store arrays")


def _after_lines(data: bytes, at: int, lines: int) -> int:
    for _ in range(lines):
        at = data.find(b"\n", at) + 1
        if not at:
            raise pickle.UnpicklingError("pickle data was truncated")
    return at


def _check_memo(index: int, before: int) -> None:
    """No index is larger than the number of values so far, each of which took an opcode."""
    if index > before:
        raise pickle.UnpicklingError(f"memo index {index} after {before} bytes of opcodes")
