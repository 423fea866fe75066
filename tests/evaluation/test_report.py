import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from flt_mol.evaluation import (
    SplitResult,
    learning_curve,
    parity,
    summarise,
    table,
    write_html,
    write_json,
)
from flt_mol.evaluation.report import notes
from flt_mol.evaluation.summary import breakdowns, constant_maes


def result(sids, error, **changes):
    error = np.asarray(error, dtype=np.float64)
    target = np.arange(len(error)) / 10
    return SplitResult(tuple(sids), target + error, target, **changes)


RESULTS = {
    "val<id>": result(
        ["a", "w", "<b>"],
        [0.01, -2.0, 0.5],
        columns={
            "natoms": (5, 12, None),
            "adsorbate": ("CO", "O", "CO"),
            "elements": ("C O Pt", "O Pt", None),
            "facet": ("111", None, "100"),
        },
        path="val.lmdb",
        unseen=("Fe",),
        further={"displacement": 0.5, "displacement_unmoved": 1.0, "displacement_atoms": 4},
    ),
    "val_ood": result([7, 8], [0.25, -0.75], columns={"natoms": (12, 300)}),
}
SUMMARY = summarise(RESULTS, {"constant": {"val_ood": 1.5}}, checkpoint="my & model")


def test_all_is_over_systems_not_over_splits():
    errors = np.abs([0.01, -2.0, 0.5, 0.25, -0.75])
    assert SUMMARY["all"]["count"] == 5
    assert SUMMARY["all"]["mae"] == pytest.approx(errors.mean())
    assert SUMMARY["all"]["ewt"] == 0.2
    assert SUMMARY["splits"]["val<id>"]["mae"] == pytest.approx(errors[:3].mean())


def test_displacements_worse_than_none_are_reported():
    assert notes(SUMMARY)["displacement"] == []
    further = {"displacement": 0.5, "displacement_unmoved": 0.25}
    (line,) = notes(summarise({"a": result(["x"], [0.0], further=further)}))["displacement"]
    for part in ("a: ", "0.500 Å", "unmoved 0.250 Å"):
        assert part in line


def test_errors_that_are_not_below_those_of_a_constant_are_reported():
    summary = summarise({"a": result(["x"], [0.5])}, {"constant": {"a": 0.25, "b": 0.0}})
    (line,) = notes(summary)["constant"]
    assert line.startswith("a: ")
    assert "0.2500 eV" in line
    better = summarise({"a": result(["x"], [0.5])}, {"constant": {"a": 9.0}})
    assert notes(better)["constant"] == []


def test_the_worst_systems_of_all_splits_are_first():
    worst = [(row["split"], row["sid"]) for row in SUMMARY["worst"]]
    assert worst == [
        ("val<id>", "w"),
        ("val_ood", 8),
        ("val<id>", "<b>"),
        ("val_ood", 7),
        ("val<id>", "a"),
    ]
    assert SUMMARY["worst"][0]["error"] == pytest.approx(-2.0)
    assert SUMMARY["worst"][0]["adsorbate"] == "O"


def test_breakdowns_group_systems():
    found = breakdowns(RESULTS["val<id>"])
    groups = {k: [(x["group"], x["count"]) for x in rows] for k, rows in found.items()}
    assert groups == {
        "adsorbate": [("O", 1), ("CO", 2)],  # the largest MAE first
        "element": [("O", 2), ("Pt", 2), ("C", 1)],
        "size": [("1–10", 1), ("11–20", 1)],
        "facet": [("100", 1), ("111", 1)],
    }
    assert found["adsorbate"][1]["mae"] == pytest.approx(0.255)
    assert found["adsorbate"][1]["ewt"] == 0.5
    sizes = [9, 10, 11, 150, 151, 200, 201, 21]
    rows = breakdowns(result(sizes, sizes, columns={"natoms": tuple(sizes)}))["size"]
    names = ["1–10", "11–20", "21–30", "101–150", "151–200", "201 or more"]
    assert [row["group"] for row in rows] == names


def test_baselines_of_constants():
    target = np.array([0.0, 1.0, 5.0])
    results = {"a": SplitResult((1, 2, 3), target, target)}
    assert constant_maes(results) == {"a": pytest.approx(5 / 3)}  # of its median, 1
    assert constant_maes(results, 2.0) == {"a": pytest.approx(2.0)}


def test_splits_need_systems_and_names():
    with pytest.raises(ValueError, match="no split"):
        summarise({})
    with pytest.raises(ValueError, match="'all'"):
        summarise({"all": RESULTS["val_ood"], "b": RESULTS["val_ood"]})


def test_the_table_has_a_row_a_split_and_one_for_all():
    heading, _, *rows = table(SUMMARY).splitlines()
    assert heading.split()[:2] == ["split", "systems"]
    assert heading.endswith("constant")
    assert [row.split()[:3] for row in rows] == [
        ["val<id>", "3", "0.8367"],
        ["val_ood", "2", "0.5000"],
        ["all", "5", "0.7020"],
    ]
    assert [row.split()[-1] for row in rows] == ["-", "1.5000", "-"]
    assert len({len(line) for line in table(SUMMARY).splitlines()}) == 1


def test_the_table_has_forces_where_a_split_has_them():
    further = {"forces_mae": 0.03125, "forces_cosine": 0.9876, "efwt": 0.125, "forces_atoms": 9}
    results = {"a": result("xy", [0.1, 0.2], further=further), "b": result("z", [0.3])}
    text = table(summarise(results, {"constant": {"a": 7.0}}))
    heading, _, first, second, _ = (re.split(r"\s\s+", line) for line in text.splitlines())
    assert heading[-4:] == ["forces (eV/Å)", "cosine", "EFwT (%)", "constant"]
    assert first[-4:] == ["0.0312", "0.9876", "12.50", "7.0000"]
    assert second[-4:] == ["-"] * 4
    assert "forces" not in table(SUMMARY)


def test_json_holds_all_numbers(tmp_path):
    path = write_json(SUMMARY, tmp_path / "new" / "results.json")
    assert json.loads(path.read_text()) == SUMMARY


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.numbers, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        if tag == "data":
            self.numbers.append(float(values["value"]))
        address = values.get("src") or values.get("href") or "data:"
        assert address.startswith("data:"), "fetched from elsewhere"

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = write_html(SUMMARY, RESULTS, tmp_path_factory.mktemp("html") / "report.html")
    return Page(path.read_text("utf-8"))


def test_the_report_escapes_what_files_hold_and_runs_nothing(page):
    assert "script" not in page.tags
    assert "sid <b> of val<id>" in page.text
    assert "b" not in {tag for tag in page.tags if tag == "<b>"}
    assert "Evaluation of my & model" in page.text


def test_the_report_shows_the_numbers_of_the_summary(page):
    for metrics in (*SUMMARY["splits"].values(), SUMMARY["all"]):
        for name in ("mae", "ewt", "rmse", "me", "median_ae"):
            assert metrics[name] in page.numbers
            assert set(metrics["intervals"][name]) <= set(page.numbers)
    assert {row["prediction"] for row in SUMMARY["worst"]} <= set(page.numbers)
    for words in ("never trained on: Fe", "displacement", "By adsorbate", "201 or more"):
        assert words in page.text
    assert page.tags.count("img") == 2


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_parity_of_any_number_of_splits_and_systems(tmp_path, splits):
    rng = np.random.default_rng(0)
    results = {
        f"s{i}": result(range(4000 * i + 1), rng.normal(size=4000 * i + 1)) for i in range(splits)
    }
    assert is_png(parity(results, tmp_path / "parity.png"))


def test_learning_curves_of_logs(tmp_path):
    rows = [
        {"epoch": 0, "val/mae": 0.5},
        {"epoch": 1, "train/mae": 0.1, "val/mae": float("nan")},
    ]
    assert is_png(learning_curve(rows, tmp_path / "a.png"))
    assert learning_curve(rows, tmp_path / "a.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="val/mae"):
        learning_curve([{"epoch": 1}], tmp_path / "b.png")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["module://no_such_backend", "no_such_backend"])
@pytest.mark.parametrize("before", ["", "import flt_mol.training.run\n"])
def test_plots_do_not_depend_on_a_backend_or_pyplot(tmp_path, backend, before):
    code = (
        f"{before}import sys, numpy as np; from flt_mol.evaluation import SplitResult, parity\n"
        f"parity({{'a': SplitResult((1,), np.ones(1), np.ones(1))}}, r'{tmp_path / 'a.png'}')\n"
        f"assert {bool(before)} or 'matplotlib.pyplot' not in sys.modules\n"
        f"import os; assert os.environ['MPLBACKEND'] == '{backend}'"
    )
    environment = {**os.environ, "MPLBACKEND": backend}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert re.search("png", str(list(tmp_path.iterdir())))
