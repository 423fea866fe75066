"""The HTML report of an evaluation: one file that opens from disk, without scripts or network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flt_mol.evaluation.breakdowns import KINDS
from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.drawing import system_png
from flt_mol.evaluation.elements import unseen_message
from flt_mol.evaluation.page import Markup, element, page, picture, table
from flt_mol.evaluation.page_figures import ewt_svg, histogram_svg, parity_svg
from flt_mol.evaluation.report import held_out_lines, shown_splits, trained_on_lines
from flt_mol.evaluation.splits import unfixed_message
from flt_mol.evaluation.summary import ALL
from flt_mol.files import temporary_path

__all__ = ["html_report", "write_html"]

Results = Mapping[str, SplitResult]

_FURTHER = {
    "energy_initial_mae": ("MAE of initial energies (eV)", 4, 1),
    "energy_initial_ewt": ("EwT of initial energies (%)", 2, 100),
    "energy_initial_count": ("systems", 0, 1),
    "displacement": ("mean distance to the relaxed position (Å)", 4, 1),
    "displacement_unmoved": ("the same if no atom moved (Å)", 4, 1),
    "displacement_atoms": ("free atoms", 0, 1),
}
_KIND_TITLES = {
    "adsorbate": "By adsorbate",
    "element": "By element (systems that contain it)",
    "size": "By number of atoms",
    "facet": "By facet",
}


def write_html(summary: Mapping[str, Any], results: Results, path: str | Path) -> Path:
    """Write :func:`html_report`; give the path back."""
    text = html_report(summary, results)
    with temporary_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def html_report(summary: Mapping[str, Any], results: Results) -> str:
    """The report as HTML.

    Every number of its tables is one of `summary`, in ``<data value="…" data-of="…">`` with all
    its digits and its place, so that programs can read it, too.

    Args:
        summary: of :func:`~flt_mol.evaluation.summary.summarise`.
        results: what it is of; worst systems whose structures they hold are drawn.
    """
    return _Report(summary, results).render()


class _Report:
    def __init__(self, summary: Mapping[str, Any], results: Results) -> None:
        self.summary = summary
        self.results = results
        self.shown = shown_splits(summary)

    def render(self) -> str:
        named = self.summary.get("checkpoint") or self.summary.get("predictions") or ""
        title = f"Evaluation of {named}" if named else "Evaluation"
        return page(
            title,
            element("h1", title),
            *self.notes(),
            self.headline(),
            *self.further(),
            self.plots(
                "Predictions and targets", parity_svg, "predictions against targets; line: equal"
            ),
            self.plots("Errors", histogram_svg, "errors"),
            self.ewt(),
            *self.breakdowns(),
            self.worst(),
        )

    def number(self, *place: Any, digits: int = 4, scale: float = 1) -> Markup:
        """A number of the summary, by its place in there."""
        value: Any = self.summary
        for key in place:
            value = value[key]
        text = f"{scale * value:.{digits}f}"
        return element("data", text, value=repr(value), data_of=json.dumps(place))

    def place(self, split: str) -> tuple[str, ...]:
        """Where the metrics of a split stand in the summary."""
        return (ALL,) if self.shown[split] is self.summary.get(ALL) else ("splits", split)

    def interval(
        self, *place: Any, digits: int = 4, scale: float = 1, style: str = "soft"
    ) -> Markup:
        low, high = (self.number(*place, i, digits=digits, scale=scale) for i in (0, 1))
        return element("span", "[", low, ", ", high, "]", class_=style)

    def notes(self) -> list[Markup]:
        told = [f"flt_mol {self.summary['flt_mol']}"]
        told += [f"{split}: {r.path}" for split, r in self.results.items() if r.path]
        notes = [element("p", " · ".join(told), class_="soft")]
        unseen = sorted({symbol for r in self.results.values() for symbol in r.unseen})
        unfixed = [split for split, r in self.results.items() if r.unfixed]
        for split, count in (self.summary.get("left_out") or {}).items():
            text = f"{split}: {count} bad records were left out"
            notes.append(element("p", text, class_="note"))
        for text in (*held_out_lines(self.summary), *trained_on_lines(self.summary)):
            notes.append(element("p", text, class_="note"))
        if unseen:
            notes.append(element("p", unseen_message(unseen), class_="note"))
        if unfixed:
            notes.append(element("p", unfixed_message(unfixed), class_="note"))
        return notes

    def headline(self) -> Markup:
        spread = self.summary["intervals"]
        level = f"{100 * spread['level']:g} %"
        baselines = self.summary["baselines"]
        heading = ["split", "systems", "MAE (eV)", "EwT (%)", "RMSE (eV)", "median |error| (eV)"]
        heading += ["mean error (eV)", *(f"MAE of {name} (eV)" for name in baselines)]
        rows = []
        for split in self.shown:
            at = self.place(split)
            row: list[str] = [split, self.number(*at, "count", digits=0)]
            for name, digits, scale in (
                ("mae", 4, 1),
                ("ewt", 2, 100),
                ("rmse", 4, 1),
                ("median_ae", 4, 1),
                ("me", 4, 1),
            ):
                value = self.number(*at, name, digits=digits, scale=scale)
                where = (*at, "intervals", name)
                ends = self.interval(*where, digits=digits, scale=scale, style="soft below")
                row.append(Markup(f"{value} {ends}"))
            for name, of in baselines.items():
                row.append(self.number("baselines", name, split) if split in of else "–")
            rows.append(row)
        caption = (
            f"In brackets: {level} intervals ({spread['method']}, {spread['draws']} draws). EwT: "
            "systems with an error below 0.02 eV. Error: prediction − target."
        )
        made = table(caption, heading, rows, ALL if ALL in self.summary else "")
        return element("section", element("h2", "All splits"), made)

    def further(self) -> list[Markup]:
        names = [n for n in _FURTHER if any(n in r.further for r in self.results.values())]
        if not names:
            return []
        rows = []
        for split, result in self.results.items():
            row: list[str] = [split]
            for name in names:
                _, digits, scale = _FURTHER[name]
                at = (*self.place(split), "further", name)
                known = name in result.further
                row.append(self.number(*at, digits=digits, scale=scale) if known else "–")
            rows.append(row)
        heading = ["split", *(_FURTHER[name][0] for name in names)]
        made = table("What else the model gives, where the data hold it.", heading, rows)
        return [element("section", element("h2", "Other outputs"), made)]

    def plots(self, title: str, draw: Any, caption: str) -> Markup:
        figures = [
            element(
                "figure",
                Markup(draw(self.results, split)),
                element("figcaption", f"{split}: {caption}"),
            )
            for split in self.results
        ]
        return element("section", element("h2", title), element("div", *figures, class_="grid"))

    def ewt(self) -> Markup:
        curves = {split: m["ewt_curve"] for split, m in self.shown.items()}
        caption = "Share of the systems whose error is smaller than a threshold."
        figure = element(
            "figure", Markup(ewt_svg(curves)), element("figcaption", caption), class_="wide"
        )
        return element("section", element("h2", "Energies within threshold"), figure)

    def breakdowns(self) -> list[Markup]:
        together = list(self.shown)[-1]
        kinds = [kind for kind in KINDS if kind in self.shown[together]["breakdowns"]]
        if not kinds:
            return []
        parts = [element("h2", "Where errors are large")]
        for kind in kinds:
            name = element("summary", element("h3", _KIND_TITLES[kind]))
            parts.append(element("details", name, self.breakdown(kind, together), open="open"))
        return [element("section", *parts)]

    def breakdown(self, kind: str, together: str) -> Markup:
        """Groups of all systems, and the MAE of each split's share of a group."""
        places: dict[str, dict[str, int]] = {}
        for split in self.results:
            of_split = self.shown[split]["breakdowns"].get(kind, [])
            places[split] = {row["group"]: i for i, row in enumerate(of_split)}
        several = list(self.results) if len(self.results) > 1 else []
        rows = []
        for i, group in enumerate(self.shown[together]["breakdowns"][kind]):
            at = (*self.place(together), "breakdowns", kind, i)
            mae = Markup(f"{self.number(*at, 'mae')} {self.interval(*at, 'mae_interval')}")
            row: list[str] = [group["group"], self.number(*at, "count", digits=0), mae]
            row.append(self.number(*at, "ewt", digits=2, scale=100))
            for split in several:
                j = places[split].get(group["group"])
                own = ("splits", split, "breakdowns", kind, j, "mae")
                row.append("–" if j is None else self.number(*own))
            rows.append(row)
        heading = [kind, "systems", "MAE (eV)", "EwT (%)", *(f"{s}: MAE" for s in several)]
        return table(f"{_KIND_TITLES[kind]}, {together}", heading, rows)

    def worst(self) -> Markup:
        drawn = {
            (split, str(system.sid[0])): system
            for split, result in self.results.items()
            for system in result.worst
        }
        cards = []
        for i, entry in enumerate(self.summary["worst"]):
            about = self.about(entry)
            content: list[str] = []
            system = drawn.get((entry["split"], str(entry["sid"])))
            if system is not None:
                seen = f"System {about}, seen from above and from the side."
                content.append(picture(system_png(system), seen))
            numbers = [
                element("span", f"{what} ", self.number("worst", i, what), f" eV{end}")
                for what, end in (("prediction", "; "), ("target", "; "), ("error", ""))
            ]
            caption = element("figcaption", element("strong", about), *numbers)
            cards.append(element("figure", *content, caption))
        title = f"The {len(cards)} largest error{'s' * (len(cards) > 1)}"
        return element("section", element("h2", title), element("div", *cards, class_="grid large"))

    def about(self, entry: Mapping[str, Any]) -> str:
        text = f"sid {entry['sid']} of {entry['split']}"
        for name, value in (
            ("adsorbate", entry.get("adsorbate")),
            ("elements", entry.get("elements")),
            ("facet", entry.get("facet")),
            ("atoms:", entry.get("natoms")),
        ):
            text += f"; {name} {value}" if value else ""
        return text
