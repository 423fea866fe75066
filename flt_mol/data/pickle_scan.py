"""A quick look through a pickle for what would end the process that loads it.

`pickle` calls nothing that the table of names does not allow, but its own C code can be led into
memory that it cannot have, or so deep into itself that the stack ends: a memo index of 2³² takes
64 GB; the hash of tuples nested 10⁵ times, used as key, ends the process.

Opcodes with arguments of fixed length are passed over by one regular expression; the loop below
turns only at strings and at those opcodes that matter.
"""

from __future__ import annotations

import pickle
import pickletools
import re

__all__ = ["scan"]

_CODE = 1 << 22  # bytes of opcodes, strings apart: each may make an object of 200 bytes
_NESTING = 20_000  # opcodes that could nest values that can be keys

_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
_NEST = frozenset(map(ord, "t\x85\x86\x87\x91Rio\x81\x92"))
_TEXTS = b"SV"
_STOP, _PUT, _LONG_PUT = map(ord, ".pr")
_COUNTED = {
    code: {-2: 1, -3: 4, -4: 4, -5: 8}[op.arg.n]
    for code, op in _OPCODES.items()
    if op.arg is not None and op.arg.n < -1
}
_LINES = {
    code: 2 if code in b"ci" else 1
    for code, op in _OPCODES.items()
    if op.arg is not None and op.arg.n == -1
}


def _passed_over() -> re.Pattern[bytes]:
    """A run of opcodes with nothing, or a number of bytes known beforehand, after them."""
    by_length: dict[int, bytes] = {}
    for code, op in _OPCODES.items():
        length = 0 if op.arg is None else op.arg.n
        if length >= 0 and code not in _NEST and code not in (_STOP, _LONG_PUT):
            by_length[length] = by_length.get(length, b"") + re.escape(bytes([code]))
    parts = [
        b"[%b]%b" % (codes, b".{%d}" % length if length else b"+")
        for length, codes in sorted(by_length.items())
    ]
    return re.compile(b"(?:" + b"|".join(parts) + b")*+", re.DOTALL)


_RUN = _passed_over().match


def scan(data: bytes, start: int = 0) -> int:
    """Where the pickle that begins at `start` ends.

    Raises:
        pickle.UnpicklingError: truncated data, a byte that is no opcode, or more than a record
            of numbers needs: memo indices beyond the number of values, 4 MiB of opcodes, 20 000
            tuples.
    """
    at, strings, nesting = start, 0, 0
    while True:
        run = _RUN(data, at) if at < len(data) else None
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
