#!/usr/bin/env python
"""Print docs/settings.md: every key of a run, its default and what it does."""

from flt_mol.analysis.settings_page import settings_page

if __name__ == "__main__":
    print(settings_page(), end="")
