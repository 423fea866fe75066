"""docs/settings.md names every key of a run, and is what the schema says."""

from pathlib import Path

import pytest

from flt_mol.analysis.settings_page import settings_page
from flt_mol.training.config import known_keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
KEYS = known_keys()
GROUPS = {key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)}


def test_every_key_is_there_once_with_words():
    rows = [line.split("|") for line in settings_page().splitlines() if line.startswith("| `")]
    named = [row[1].strip(" `") for row in rows]
    nested = {key for key in GROUPS if "." in key}  # model.rpe is a key of model, too
    assert sorted(named) == sorted({*KEYS} - GROUPS | nested)
    assert all(len("|".join(row[3:]).strip(" |")) > 1 for row in rows)


def test_values_are_written_as_yaml():
    text = settings_page()
    assert "| `training.epochs` | `60` |" in text
    assert "| `training.loggers` | `[csv, tensorboard]` |" in text
    assert "| `data.skip_bad` | `false` |" in text
    assert "None" not in text
    assert ":func:" not in text


def test_the_page_is_up_to_date():
    if not PAGE.is_file():
        pytest.skip("needs the checkout")
    assert PAGE.read_text("utf-8") == settings_page(), (
        "python scripts/settings_page.py > docs/settings.md"
    )
