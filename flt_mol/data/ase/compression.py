"""Compressed files of structures, which ASE knows by their names alone."""

from __future__ import annotations

from pathlib import Path

from flt_mol.compressed import SUFFIXES, packing

__all__ = ["COMPRESSED", "refuse_compressed", "refuse_packing"]

COMPRESSED = tuple(SUFFIXES.values())
"""Ends of the names of files that ASE unpacks."""
_WHOLE = ("db", "json")  # which it does not


def refuse_packing(path: Path, head: bytes, kind: str) -> None:
    """ASE goes by the name alone: a file that is compressed and not called so, or the reverse.

    Args:
        path: the file.
        head: its first bytes.
        kind: ASE's name of the format, empty where it cannot say.

    Raises:
        ValueError: with the mend.
    """
    packed, suffix = packing(head), path.suffix.lower()
    if packed is None:
        if suffix in COMPRESSED and kind != "db":
            raise ValueError(
                f"{path} is not compressed, though it is called {suffix}: rename it to "
                f"{path.with_suffix('').name}"
            )
    elif packed not in SUFFIXES or kind in _WHOLE:
        raise ValueError(f"{path} is compressed ({packed}): unpack it first")
    elif suffix != SUFFIXES[packed]:
        raise ValueError(
            f"{path} is compressed ({packed}), and not called so: rename it to "
            f"{path.name}{SUFFIXES[packed]}, or unpack it"
        )
    elif not kind:
        raise ValueError(f"{path} is cut off or damaged, as a {packed} file: get or write it again")


def refuse_compressed(path: Path, head: bytes) -> None:
    """Refuse a compressed file of no known format.

    Raises:
        ValueError: with the mend.
    """
    if (packed := packing(head)) is not None:
        raise ValueError(f"{path} is compressed ({packed}): unpack it first")
