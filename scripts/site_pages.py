"""Hooks of mkdocs: pages from outside docs/, one page per public module, the project's addresses.

A page links to files by their place in the repository, so that links work there, too. On the site
links to other pages and modules lead to these, and links to other files become text.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "*/*/*.md", "experiments/*/*.png"]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
MODULE = "# {0}\n\n::: {0}\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Addresses come from `[project.urls]`, the list of experiments from their folders."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    addresses = project.get("urls", {})
    config.site_url = addresses.get("Documentation", "")
    config.repo_url = addresses.get("Repository", "")
    pages = sorted(x.relative_to(ROOT).as_posix() for x in ROOT.glob("experiments/*/*.md"))
    next(part for part in config.nav or [] if "Experiments" in part)["Experiments"] = pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages from outside docs/ and one for each module named in the navigation."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith((".", "docs/", "build/", "runs/")):
                files.append(File.generated(config, name, abs_src_path=str(path)))
    for name in entries(config.nav):
        if name.startswith("api/"):
            content = MODULE.format(name[len("api/") : -len(".md")])
            files.append(File.generated(config, name, content=content))
    return files


def entries(nav: Any) -> Iterator[str]:
    """Pages named in a navigation."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(part)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links between places in the repository links between pages."""
    inside = not (ROOT / page.file.src_uri).is_file() or page.file.src_uri == "README.md"
    here = posixpath.dirname(f"docs/{page.file.src_uri}" if inside else page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        place = posixpath.normpath(posixpath.join(here, target))
        module = place.removesuffix(".py").replace("/", ".")
        name = f"api/{module}.md" if place.endswith(".py") else place.removeprefix("docs/")
        if files.get_file_from_path(name):
            start = posixpath.dirname(page.file.src_uri) or "."
            return f"[{text}]({posixpath.relpath(name, start)}{anchor or ''})"
        return str(text) if (ROOT / place).exists() else found[0]

    return LINK.sub(link, markdown)
