"""The yaml file of a run: where it is, and whether it is one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from flt_mol.files import shipped_folder


def find_run(name_or_path: str) -> Path:
    """The file of a run: by name in `configs/`, or by path.

    Raises:
        ValueError: neither, naming the nearest one, or all.
    """
    path = Path(name_or_path)
    if path.suffix == ".yml":
        raise ValueError(f"{path}: only .yaml is read; rename it to {path.with_suffix('.yaml')}")
    if path.suffix == ".yaml":
        if path.is_file():
            return path.resolve()
        raise ValueError(f"no configuration file {path}")
    folder = shipped_folder("configs")
    shipped = sorted(file.stem for file in folder.glob("*.yaml"))
    if name_or_path in shipped:
        return folder / f"{name_or_path}.yaml"
    near = difflib.get_close_matches(name_or_path, shipped, n=1)
    there = f"did you mean {near[0]}?" if near else f"there are: {', '.join(shipped)}"
    raise ValueError(
        f"no run called '{name_or_path}' in configs/ ({there}); a file of your own is given by its "
        "path, ending in .yaml"
    )


def run_name(name_or_path: str) -> str:
    """What a run is called: its file, or, where that is a run's config.yaml, that run's folder.

    Example:
        >>> run_name("emt_small"), run_name("runs/mine.yaml"), run_name("runs/mine/config.yaml")
        ('emt_small', 'mine', 'mine')
    """
    path = Path(name_or_path)
    if path.name == "config.yaml":
        return path.resolve().parent.name or path.stem
    return path.stem if path.suffix == ".yaml" else path.name


def read_run(file: Path) -> dict[Any, Any]:
    """What a file holds: Hydra's own errors name no file, and some files end in its tracebacks.

    Raises:
        ValueError: no valid yaml, no mapping, or a key given twice, naming file and line.
    """
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        repeated = _repeated(yaml.compose(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{file}{place}: this is no valid yaml: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: this is no valid yaml: {error}") from error
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds no mapping of keys to values; see configs/ for examples")
    if repeated:
        raise ValueError(f"{file}: {repeated}: leave one of them out")
    return content


def _repeated(node: yaml.Node | None) -> str:
    """The first key that a mapping has twice, of which yaml would keep the last value only."""
    found: list[str] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                return f"duplicate key {key.value} in line {key.start_mark.line + 1}"
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
            found.append(_repeated(value))
    elif isinstance(node, yaml.SequenceNode):
        found = [_repeated(value) for value in node.value]
    return next(filter(None, found), "")
