"""Where the data folders `datasets/`, `models/` and `configs/` lie: checkout or installed wheel."""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(kind: str) -> Path:
    """The folder of the shipped ``datasets``, ``models`` or ``configs``.

    A checkout next to the package wins, then the wheel's ``share/flt_mol``.

    Raises:
        FileNotFoundError: neither exists, which means a broken installation.

    Example:
        >>> folder("configs").name
        'configs'
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        return checkout / kind
    candidates = [Path(sysconfig.get_path("data")) / "share" / "flt_mol" / kind]
    candidates += _from_installed_files(kind)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    tried = ", ".join(str(path) for path in [checkout / kind, *candidates])
    raise FileNotFoundError(
        f"the folder '{kind}' that belongs to flt_mol is missing (tried {tried}); "
        "install the package again"
    )


def _from_installed_files(kind: str) -> list[Path]:
    """Places named by the installer's record, for `pip install --user`, `--target`, `--prefix`."""
    try:
        files = metadata.files("flt_mol") or []
    except metadata.PackageNotFoundError:
        return []
    marker = ("share", "flt_mol", kind)
    found: dict[Path, None] = {}
    for file in files:
        parts = file.parts
        for i in range(len(parts) - 3):
            if parts[i : i + 3] == marker:
                inside = len(parts) - (i + 3)
                found[Path(str(file.locate())).resolve().parents[inside - 1]] = None
    # `pip install --target` moves the data beside the packages without telling the record.
    found[_PACKAGE.parent / "share" / "flt_mol" / kind] = None
    return list(found)
