"""Files that may be compressed, known by their first bytes, whatever they are called."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

__all__ = ["SUFFIXES", "packing", "plain_suffix", "read_text"]

SUFFIXES = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz"}
"""Ways to compress a file that are read, and what the names of such files end in."""
_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "bzip2": bz2.decompress,
    "xz": lzma.decompress,
}
_BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
_BZIP2 = (b"1AY&SY", b"\x17rE8P\x90")  # of a block, or of the end of an empty file


def packing(head: bytes) -> str | None:
    """How a file with these first bytes is compressed: "gzip", "bzip2", "xz", "zip", "zstd", "7z".

    Example:
        >>> packing(gzip.compress(b"sid,energy")), packing(b"sid,energy")
        ('gzip', None)
    """
    if head.startswith(b"BZh") and head[4:10] not in _BZIP2:  # a text may begin so, too
        return None
    return next((kind for start, kind in _BEGINNINGS.items() if head.startswith(start)), None)


def plain_suffix(path: Path) -> str:
    """What the name ends in without that of a compressed file, in small letters.

    Example:
        >>> plain_suffix(Path("a.JSON.gz")), plain_suffix(Path("a.csv"))
        ('.json', '.csv')
    """
    named = path.with_suffix("") if path.suffix.lower() in SUFFIXES.values() else path
    return named.suffix.lower()


def read_text(path: Path) -> str:
    """The text of a file, in UTF-8, unpacked if it is compressed.

    Raises:
        ValueError: no such file, one that is cut off, compressed in another way, or no text, naming
            it with the mend.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist (looked in {path.absolute().parent})") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    kind = packing(data)
    if kind is not None:
        if kind not in _UNPACK:
            raise ValueError(
                f"{path} is a {kind} archive (spreadsheets are, too), expected text: unpack it, or "
                "save it as .csv"
            )
        try:
            data = _UNPACK[kind](data)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(
                f"{path} is cut off or damaged, as a {kind} file ({error}): get or write it again"
            ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8 (byte {error.start}): save it as .csv in UTF-8"
        ) from error
