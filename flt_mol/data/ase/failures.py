"""What went wrong where ASE could not read a file, in words for people."""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from contextlib import suppress
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
    if _is_markup(path):
        return "it is a web page or XML: the download went wrong"
    text = str(error)
    if not text:
        return f"its reader stops without a reason ({type(error).__name__}): is it such a file?"
    if text.startswith("could not broadcast"):
        return f"a line of numbers is too short, or missing at the end ({text})"
    if text.startswith("ufunc"):
        return f"something is no number that should be one ({text})"
    if _MARK in text or repr(_MARK)[1:-1] in text:
        return f"it begins with a byte order mark: save it as UTF-8 without one ({text})"
    return text


def _is_markup(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"<") and path.suffix.lower() != ".xml"
    return False
