"""HTML whose text cannot be anything but text: elements, tables, one self-contained page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Markup", "element", "page", "picture", "safe", "table"]

_VOID = {"img", "meta"}

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --page: #ffffff; --soft: #5a5a5a;
  --line: #d9d9d9; --card: #f6f6f4; --accent: #a3420f; }
@media (prefers-color-scheme: dark) { :root { --text: #ececec; --page: #141618; --soft: #a9adb1;
  --line: #3a3e42; --card: #1e2124; --accent: #f0a074; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--text);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.5rem; font-size: 1.25rem; }
p, figcaption, caption { max-width: 46rem; }
.soft, figcaption, caption { color: var(--soft); font-size: 0.9rem; text-align: left; }
.note { border-left: 0.3rem solid var(--accent); padding: 0.4rem 0.8rem; background: var(--card); }
.scroll { overflow-x: auto; margin: 1rem 0; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { vertical-align: bottom; white-space: normal; border-bottom: 2px solid var(--line); }
tr.all > * { border-top: 2px solid var(--line); font-weight: 600; }
td .soft { font-weight: 400; text-align: right; }
caption { max-width: min(46rem, calc(100vw - 2rem)); }
figcaption strong { display: block; }
.below { display: block; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); }
.grid.large { grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
.wide { max-width: 36rem; }
figure { margin: 0; padding: 0.6rem; background: var(--card); border-radius: 0.4rem;
  min-width: 0; }
figure svg, figure img { width: 100%; height: auto; display: block; }
summary { cursor: pointer; padding: 0.3rem 0; }
summary h3 { display: inline; font-size: 1.05rem; }
"""


class Markup(str):
    """HTML that is safe as it is."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """An element; children that are plain text, and all attributes, are escaped.

    Args:
        tag: name.
        *children: in order.
        **attributes: ``class_`` stands for class, ``data_of`` for data-of.

    Example:
        >>> element("p", "a < b, ", element("b", "so"), class_="soft")
        '<p class="soft">a &lt; b, <b>so</b></p>'
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    opened = "".join(f' {names[name]}="{safe(value)}"' for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{opened}>")
    inside = "".join(child if isinstance(child, Markup) else safe(child) for child in children)
    return Markup(f"<{tag}{opened}>{inside}</{tag}>")


def safe(text: str) -> str:
    """Text escaped for HTML, with what cannot be shown or encoded written as an escape."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return escape(shown)


def table(
    caption: str,
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    last: str = "",
) -> Markup:
    """A table that scrolls by itself where the page is narrow.

    Args:
        caption: what it shows.
        heading: of the columns.
        rows: cells, the first of which names the row.
        last: name of a row that is set apart.
    """
    head = element("tr", *(element("th", text, scope="col") for text in heading))
    body = []
    for name, *cells in rows:
        attributes = {"class_": "all"} if name == last and last else {}
        first = element("th", name, scope="row")
        body.append(element("tr", first, *(element("td", c) for c in cells), **attributes))
    made = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )
    return element("div", made, class_="scroll", role="region", tabindex="0", aria_label=caption)


def picture(png: bytes, description: str) -> Markup:
    """A PNG within the page, described for those who cannot see it."""
    data = base64.b64encode(png).decode("ascii")
    return element("img", src=f"data:image/png;base64,{data}", alt=description, loading="lazy")


def page(title: str, *sections: Markup) -> str:
    """A whole document. Nothing in it is fetched from anywhere, and browsers are told so."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(_STYLE)),
    )
    body = element("body", element("main", *sections))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"
