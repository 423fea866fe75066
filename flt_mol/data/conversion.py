"""Any data set to a flat file (.safetensors), .aselmdb or .extxyz, compared at the end."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flt_mol.data.ase import to_ase
from flt_mol.data.checks import Unusual
from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.flat import write_flat
from flt_mol.data.lmdb import write_lmdb
from flt_mol.data.opening import open_dataset
from flt_mol.files import check_suffix, temporary_path
from flt_mol.structures import Structures

Progress = Callable[[int, int | None], None]
"""Called with how many records are done, and of how many."""

SUFFIXES = (".safetensors", ".aselmdb", ".extxyz")
_CHUNK = 256  # systems read together
_DIGITS = 1e-8  # Å, of positions in .extxyz


@dataclass(frozen=True)
class ConvertResult:
    """Result of a conversion.

    Args:
        output: the file.
        systems: how many it holds.
        bytes: its size.
        skipped: those of the source.
    """

    output: Path
    systems: int
    bytes: int
    skipped: tuple[str, ...]

    @property
    def bytes_per_system(self) -> float:
        """Mean size of a system in the output."""
        return self.bytes / self.systems


def convert(
    source: StructuresDataset,
    output: str | Path,
    *,
    indices: Sequence[int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    unusual: Unusual | None = None,
) -> ConvertResult:
    """Write systems of `source` to another kind of file, from which the same systems are read.

    `open_dataset(output)` gives the same `Structures` in the same order: bit for bit, but for
    vectors in .extxyz, which have eight decimals. Targets that `source` reads under other names
    are stored under OC20's, forces where it reads them; further plain values are kept; graphs and
    large further arrays are not. The file gets its name when it is complete and compared.

    Args:
        source: the records.
        output: the file; its suffix, .safetensors (`flt_mol.data.flat`), .aselmdb or .extxyz,
            sets the format.
        indices: which systems, in which order; None for all.
        overwrite: replace an output that exists.
        progress: called with records done and all: each counts when written, and when compared.
        unusual: where to put what looks wrong, instead of warnings of it.

    Raises:
        ValueError: an invalid record, or one that this format cannot hold, naming it and the
            field; an output that exists or has another suffix.
        OSError: a full disk.

    Warns:
        UserWarning: what looks wrong, `flt_mol.data.checks.Unusual`.
    """
    output = Path(output)
    write = _WRITERS[check_suffix(output, SUFFIXES)]
    if output.is_dir() or (os.path.lexists(output) and not overwrite):
        raise ValueError(f"{output} exists: choose another name, or for a file --overwrite")
    chosen = range(len(source)) if indices is None else indices
    if not len(chosen):
        raise ValueError(f"{source.path}: no records to convert")
    done, found = 0, unusual or Unusual()

    def count(systems: int) -> None:
        nonlocal done
        done += systems
        if progress is not None:
            progress(done, 2 * len(chosen))

    def batches() -> Iterator[Structures]:
        for _, batch in readable_batches(source, chosen):
            found.add(batch)
            found.add_energies(batch)
            yield batch
            count(len(batch))

    with temporary_path(output, durable=True) as temporary:
        write(batches(), temporary)
        _compare(source, chosen, temporary, count)
        size = temporary.stat().st_size
    if unusual is None:
        found.warn()
    return ConvertResult(output, len(chosen), size, tuple(source.skipped))


def drop_systems(
    source: StructuresDataset, sids: Iterable[Any] = (), largest: float = math.inf
) -> list[str]:
    """Take systems out of `source`, by sid or with |energy| beyond `largest`, eV; their sids.

    Raises:
        ValueError: a sid that no system has; an invalid record.
    """
    named, kept, dropped = set(map(str, sids)), list[int](), list[str]()
    for rows, batch in readable_batches(source, range(len(source))):
        energies = [0.0] * len(rows) if batch.energy is None else batch.energy.tolist()
        for row, sid, energy in zip(rows, map(str, batch.sid), energies, strict=True):
            if sid in named or abs(energy) > largest:
                dropped.append(sid)
            else:
                kept.append(row)
    if missing := sorted(named.difference(dropped)):
        raise ValueError(f"{source.path}: no system has the sid {', '.join(missing)}")
    source.keep(kept)
    return dropped


def readable_batches(
    source: Any, indices: Sequence[int], on_invalid: Callable[[str], None] | None = None
) -> Iterator[tuple[list[int], Structures]]:
    """Systems in batches of which either all or none have each target, with their indices.

    `on_invalid` gets the messages of invalid records, which are skipped; else the first raises.
    """
    for start in range(0, len(indices), _CHUNK):
        rows = [int(index) for index in indices[start : start + _CHUNK]]
        with suppress(ValueError):
            batch = source.batch(rows)
            if None not in (batch.energy, batch.energy_initial, batch.positions_relaxed):
                yield rows, batch
                continue
        for row in rows:
            try:
                system = source[row]
            except ValueError as error:
                if on_invalid is None:
                    raise
                on_invalid(str(error))
            else:
                yield [row], system


def _atoms(system: Structures) -> Any:
    """One system as ASE atoms, with all that a file is to hold in `info` and `arrays`."""
    atoms: Any = to_ase(system)
    atoms.info |= {name: value for name, (value,) in system.info.items() if value is not None}
    if system.positions_relaxed is not None:
        atoms.arrays["pos_relaxed"] = system.positions_relaxed.double().numpy()
    return atoms


def _write_frames(batches: Iterator[Structures], path: Path) -> None:
    """Extended XYZ as ASE writes it; texts that it would read as numbers in its JSON form."""
    from ase.io.extxyz import write_extxyz

    with path.open("w", encoding="utf-8") as file:
        for atoms in (_atoms(system) for batch in batches for system in batch):
            for name, value in atoms.info.items():
                atoms.info[name] = _kept_text(value) if isinstance(value, str) else value
            if atoms.calc is not None:  # its results are no columns
                atoms.arrays["forces"], atoms.calc = atoms.calc.results["forces"], None
            further = [name for name in atoms.arrays if name not in ("numbers", "positions")]
            write_extxyz(file, [atoms], columns=["symbols", "positions", *further, "move_mask"])


def _kept_text(text: str) -> str:
    from ase.io.extxyz import key_val_dict_to_str, key_val_str_to_dict

    back = key_val_str_to_dict(key_val_dict_to_str({"text": text})).get("text")
    kept = isinstance(back, str) and back == text and "\n" not in text and text.isascii()
    # ASE's reader takes one level of backslashes off.
    return text if kept else "_JSON " + json.dumps(text).replace("\\", "\\\\")


def _write_rows(batches: Iterator[Structures], path: Path) -> None:
    """An LMDB file of ASE's rows under the keys 1, 2, …, as ase-db-backends writes them."""
    from ase.io.jsonio import encode

    def items() -> Iterator[tuple[bytes, bytes]]:
        count = 0
        for count, system in enumerate((system for batch in batches for system in batch), 1):
            yield str(count).encode(), zlib.compress(encode(_row(system)).encode())
        yield b"nextid", zlib.compress(str(count + 1).encode())

    write_lmdb(path, items())


def _row(system: Structures) -> dict[str, Any]:
    from ase.db.row import atoms2dict

    atoms = _atoms(system)
    data = {**atoms.info, **{n: v for n, v in atoms.arrays.items() if n == "pos_relaxed"}}
    row = {**atoms2dict(atoms), "data": data, "key_value_pairs": {}}
    # ASE's rows have a random name; here it is made of what the row holds.
    row["unique_id"] = hashlib.sha256(repr(data).encode()).hexdigest()[:32]
    return {**row, "ctime": 0.0, "mtime": 0.0, "user": ""}


_WRITERS: dict[str, Callable[..., object]] = {
    ".safetensors": write_flat,
    ".aselmdb": _write_rows,
    ".extxyz": _write_frames,
}


def _compare(
    source: StructuresDataset, indices: Sequence[int], written: Path, count: Callable[[int], None]
) -> None:
    near = _DIGITS if written.suffix.lower() == ".extxyz" else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that the source took, too
        back, first = open_dataset(written, forces=source.options.forces), 0
        if len(back) != len(indices):
            raise ValueError(f"{len(indices)} systems were written, but {len(back)} are read")
        for rows, expected in readable_batches(source, indices):
            batches = readable_batches(back, range(first, first + len(rows)))
            found = Structures.cat([batch for _, batch in batches])
            for field in (f.name for f in fields(Structures)):
                a, b = getattr(expected, field), getattr(found, field)
                rounded = field.startswith(("positions", "forces"))
                if not _same(a, b, near if rounded else 0.0):
                    raise ValueError(
                        f"{source.where(rows[0])} and following: {field} is not preserved by "
                        f"{written.suffix}; choose another kind of file"
                    )
            first += len(rows)
            count(len(rows))


def _same(a: Any, b: Any, near: float) -> bool:
    if isinstance(a, Mapping):  # in any order
        a, b = sorted(a.items()), sorted(b.items())
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return repr(a) == repr(b)
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.allclose(a, b, rtol=0.0, atol=near, equal_nan=True)
