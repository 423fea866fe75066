"""No module or name with a leading underscore is imported from another folder."""

import ast
from pathlib import Path

import pytest

import flt_mol

PACKAGE = Path(flt_mol.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flt_mol"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def folder(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 2 else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_stay_in_their_folder(path):
    own = path.relative_to(PACKAGE).parts[0]
    private = [
        name
        for name in imported(path)
        if folder(name) != own
        and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))
    ]
    assert not private


def test_no_module_has_the_name_of_a_public_function():
    names = {path.stem for path in FILES} - {"__init__", "__main__"}
    assert not names & set(flt_mol.__all__)
