"""The documentation site: every public name has its place, and reading needs no network."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MODULES = re.findall(r"api/(flt_mol[\w.]*)\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    build = import_module("mkdocs.commands.build").build
    config = import_module("mkdocs.config").load_config
    folder = tmp_path_factory.mktemp("site")
    build(config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_the_page_of_its_module(site, module):
    page = (site / "api" / f"{module}.html").read_text("utf-8")
    names = getattr(import_module(module), "__all__", [])
    missing = {x for x in names if f'id="{module}.{x}"' not in page}
    assert missing <= {"__version__"}
    assert ">>>" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//', text), page
        assert not re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect)" href="http', text), page


def test_the_page_of_settings_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    page = import_module("settings_page").settings_page()
    sys.modules.pop("settings_page")
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == page + "\n"


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {name for name in pages if f" {name}\n" not in text} == set()
    assert yaml.safe_load(text)["theme"]["font"] is False
