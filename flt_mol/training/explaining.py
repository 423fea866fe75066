"""What Hydra and OmegaConf say of a configuration that does not work, in plain words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from flt_mol.training.overrides import PATHS

_PLAIN = (
    (
        r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.?",
        "expected a list, [a,b]",
    ),
    (
        r"Invalid type assigned: NoneType is not a subclass of \w+\.?( value: None)?",
        "null is no value here",
    ),
    (
        r"Invalid type assigned: \w+ is not a subclass of \w+\.?( value: \S+)?",
        "expected a mapping of its settings, {key: value}",
    ),
    (r"(=\s*\{.*)Cannot merge DictConfig with ListConfig", r"\1expected a list, [a,b]"),
    (r"(=\s*\[.*)Cannot merge DictConfig with ListConfig", r"\1expected a mapping {key: value}"),
    (
        r"Cannot merge DictConfig with ListConfig",
        "a list stands where a mapping belongs, or a mapping in the place of a list",
    ),
    (r"Cannot assign \w+ to Dict\[str, str\]", "expected a mapping of texts, {key: text}"),
    (r"In '[^']*': \w+ raised while composing config:\s*", ""),
    (r"^invalid literal for int\(\) with base 10: ('.*')", r"\1 is no place in a list: 0, 1, …"),
    (r"list index out of range", "the list has no such place"),
    (r"\s*\b(reference|object)_type=\S+", ""),
    (r"\bfull_key: (\S+)", r"(\1)"),
    (r"See https\S+ for details", ""),
)


def explain(error: Exception, known: Sequence[str]) -> str:
    """The library's message without its tail; of a misspelt key what :func:`unknown` says.

    Args:
        error: what composing a configuration ended in.
        known: all dotted keys of the schema.
    """
    message = str(error).split("Config search path")[0].strip()
    match = re.search(r"Could not override '([^']+)'", message) or re.search(
        r"full_key: (\S+)", message
    )
    # A place in a list, as loss.pass_weights[1], is no key; what is within data.paths is anything.
    key = match.group(1).partition("[")[0] if match else ""
    if key and key not in known and not key.startswith(PATHS):
        return unknown(key, known)
    # The causes of some errors have no text but that of None.
    cause = "" if str(error.__cause__) == "None" else str(error.__cause__).split("\n")[0]
    text = f"{message}: {cause}" if cause else message
    for pattern, plain in _PLAIN:
        text = re.sub(pattern, plain, text)
    return " ".join(text.split())


def unknown(key: str, known: Sequence[str]) -> str:
    """What to say of a key that is not in the schema: the nearest one, or those beside it.

    Example:
        >>> unknown("training.epoch", ["training", "training.epochs"])
        "unknown key 'training.epoch'; did you mean 'training.epochs'?"
    """
    right, wrong = "", key.split(".")
    while wrong and any(k.startswith(f"{right}{wrong[0]}.") for k in known):
        right += f"{wrong.pop(0)}."
    beside = [k for k in known if k.startswith(right) and "." not in k.removeprefix(right)]
    last = [k.removeprefix(right) for k in beside]
    near = difflib.get_close_matches(wrong[0] if wrong else "", last, n=1)
    if not near:
        return f"unknown key '{key}'; known here: {', '.join(beside)}"
    whole = ".".join([right + near[0], *wrong[1:]])
    return f"unknown key '{key}'; did you mean '{whole if whole in known else right + near[0]}'?"
