"""The `defaults` of a run's file: what is named first gives way to what is named later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

__all__ = ["check_appended", "check_defaults", "files_of"]

SCHEMA = "run_schema"
_ADDED = re.compile(r"\+(model|data)=(.*)")


def check_defaults(name: str) -> list[str]:
    """Refuse `defaults` whose order would silently undo settings, of a file or of those it names.

    Hydra is to be initialised with the file's folder.

    Args:
        name: of the file, without its ending.

    Returns:
        The names of all files that are a whole run: it, and those that its `defaults` begin with.

    Raises:
        ValueError: `run_schema` is not the first of all, or `_self_` is not the last of a file.
    """
    loader = GlobalHydra.instance().config_loader()
    order = loader.compute_defaults_list(name, [], RunMode.RUN).defaults
    order = [x for x in order if x.primary or not str(x.config_path).startswith("hydra/")]
    _begin_with_schema(order)
    for place, element in enumerate(order):
        if element.is_self:
            late = [x for x in order[place + 1 :] if x.parent == element.config_path]
            if late:
                raise ValueError(_late(element, late, order))
    return [str(x.config_path) for x in order if x.is_self and not x.package]


def _begin_with_schema(order: Sequence[ResultDefault]) -> None:
    first = order[0]
    if first.config_path == SCHEMA and not first.package:
        return
    names = [_written(x) for x in order if not x.is_self]
    before = names[: names.index(SCHEMA)] if SCHEMA in names else []
    lost = f", which takes the place of all before it: {', '.join(before)}" if before else ""
    raise ValueError(
        f"its defaults must begin with '{SCHEMA}'{lost}; write defaults: "
        f"[{SCHEMA}, {{model: flt-small}}, _self_], with what you want to name in the middle"
    )


def _late(element: ResultDefault, late: Sequence[ResultDefault], order: list[ResultDefault]) -> str:
    names = [_written(x) for x in order if x.parent == element.config_path]
    where = "its defaults" if element.primary else f"the defaults of {element.config_path}.yaml"
    return (
        f"in {where} {', '.join(map(_written, late))} comes after _self_ and would take the place "
        f"of what the file itself sets: put _self_ last, defaults: [{', '.join(names)}, _self_]"
    )


def _written(element: ResultDefault) -> str:
    """An element as it is written in a list of defaults."""
    group, _, name = str(element.config_path).rpartition("/")
    return f"{{{group}: {name}}}" if group else name


def files_of(names: Sequence[str], folder: Path) -> list[Path]:
    """The files that `check_defaults` names, those in the folder of the run."""
    return [file for name in names if (file := folder / f"{name}.yaml").is_file()]


def check_appended(overrides: Sequence[str], files: Sequence[Path]) -> None:
    """Refuse ``+model=NAME`` where a file sets something under `model`: it would come after that.

    Args:
        overrides: of the command line.
        files: of the run.

    Raises:
        ValueError: naming the override, the file and the mend.
    """
    for override in overrides:
        match = _ADDED.fullmatch(override)
        if match is None:
            continue
        group, name = match.groups()
        for file in files:
            if (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get(group):
                raise ValueError(
                    f"'{override}' would come after what {file.name} sets under {group}, and take "
                    f"its place: write {{{group}: {name}}} before _self_ in its defaults"
                )
