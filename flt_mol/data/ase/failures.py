"""What went wrong where ASE could not read a file, in words for people."""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from pathlib import Path

from flt_mol.data.ase.compression import COMPRESSED

__all__ = ["what_failed"]

_MARK = "\ufeff"
_SYMBOL = re.compile("'[A-Za-z]{1,3}'")


def what_failed(path: Path, error: BaseException) -> str:
    """The reason, from the exception that ASE's reader ended with.

    Example:
        >>> what_failed(Path("a.xyz"), KeyError("D"))
        "there is no element 'D'; symbols are those of the table (H for deuterium)"
    """
    broken = isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile)
    if broken and path.suffix.lower() in COMPRESSED:
        return f"it is cut off or damaged, as a compressed file ({error}): get it again"
    if isinstance(error, KeyError) and _SYMBOL.fullmatch(str(error)):
        return f"there is no element {error}; symbols are those of the table (H for deuterium)"
    text = str(error) or type(error).__name__
    if _MARK in text or repr(_MARK)[1:-1] in text:
        return f"it begins with a byte order mark: save it as UTF-8 without one ({text})"
    return text
