"""Whether a run's file has lists, mappings and single values where the schema has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from flt_mol.models.rules import kind_name
from flt_mol.training.explaining import unknown

__all__ = ["check_shape"]

_BELONGS = {
    "model": "; a named model is chosen in the defaults: [run_schema, {{model: {0}}}, _self_]",
    "data": "; a named data set is chosen in the defaults: [run_schema, {{data: {0}}}, _self_]",
    "finetune": "; to start from a checkpoint, finetune: {{checkpoint: {0}}}",
}


def check_shape(content: Mapping[Any, Any], schema: type, known: list[str], path: str = "") -> None:
    """Refuse keys that are not in the schema, and values of another shape.

    What a single number or text has to be is left to whoever reads it.

    Args:
        content: of the file, or of a part of it.
        schema: dataclass of that part.
        known: all dotted keys of the whole schema.
        path: of the part, as "model.".

    Raises:
        ValueError: the key, its value and what is expected.
    """
    kinds = get_type_hints(schema)
    for key, value in content.items():
        name = f"{path}{key}"
        if name == "defaults":
            continue
        if name == "hydra":
            raise ValueError("hydra's own settings have no effect here: take 'hydra' out")
        if key not in kinds:
            raise ValueError(_unknown(name, str(key), value, known))
        if isinstance(value, str) and "${" in value:
            continue
        fitting = get_args(kinds[key]) if get_origin(kinds[key]) not in (list, dict) else ()
        some = fitting or (kinds[key],)
        if value is None and NoneType not in some:
            raise ValueError(
                f"{name} is empty or null, expected {_expected(some)}; or leave it out"
            )
        if value is not None:
            _check_value(name, value, some, known)


def _check_value(name: str, value: Any, kinds: tuple[Any, ...], known: list[str]) -> None:
    kind = kinds[0]
    if is_dataclass(kind) and isinstance(value, Mapping):
        check_shape(value, kind, known, f"{name}.")  # type: ignore[arg-type]
        return
    if is_dataclass(kind):
        fits = False
    elif get_origin(kind) is list:
        fits = isinstance(value, list) and all(_single(x, get_args(kind)[0]) for x in value)
    elif get_origin(kind) is dict:
        fits = isinstance(value, Mapping) and all(_single(x, str) for x in value.values())
    else:
        fits = not isinstance(value, list | Mapping)
    if not fits:
        mend = _BELONGS.get(name, "").format(value) if isinstance(value, str) else ""
        raise ValueError(f"{name} is {value!r}, expected {_expected(kinds)}{mend}")


def _single(value: Any, kind: type) -> bool:
    if value is None or isinstance(value, list | Mapping):
        return False
    if kind is not float or (isinstance(value, str) and "${" in value):
        return True
    try:  # yaml takes 1e-3 for a text, and what reads the file for a number
        float(value)
    except ValueError:
        return False
    return not isinstance(value, bool)


def _expected(kinds: tuple[Any, ...]) -> str:
    kind = kinds[0]
    if is_dataclass(kind):
        found = "a mapping of its settings, {key: value}"
    elif get_origin(kind) is list:
        found = "a list of numbers, [1, 2]" if get_args(kind)[0] is float else "a list, [a, b]"
    elif get_origin(kind) is dict:
        found = "a mapping of texts, {split: path}"
    else:
        return kind_name(kinds)
    return f"{found}, or null" if NoneType in kinds else found


def _unknown(name: str, key: str, value: Any, known: list[str]) -> str:
    if "." in key and name in known:
        first, _, last = key.rpartition(".")
        nested = f"{{{last}: {value}}}"
        for part in reversed(first.split(".")[1:]):
            nested = f"{{{part}: {nested}}}"
        return f"'{name}' is one key with dots: in a file it is {first.split('.')[0]}: {nested}"
    return unknown(name, known)
