import csv
import json

import numpy as np
import pytest

from flt_mol.evaluation import report
from flt_mol.evaluation.breakdowns import breakdowns, size_bin
from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.metrics import metrics_of
from flt_mol.evaluation.summary import ewt_curve, join_results, rank_worst, summarise


def result(error, target=0.0, sid=None, **columns):
    error = np.asarray(error, dtype=np.float64)
    target = np.full(len(error), float(target))
    sid = tuple(range(len(error))) if sid is None else sid
    return SplitResult(
        sid, target + error, target, metrics_of(target + error, target), "p", ("Fe",), columns
    )


@pytest.fixture
def results():
    return {
        "val_id": result(
            [0.01, -0.5, 0.1, 0.3],
            natoms=(9, 10, 11, 300),
            adsorbate=("CO", "CO", "H", None),
            elements=("C Cu O", "C Ni O", "H Ni", "Ni"),
        ),
        "val_ood_ads": result([0.5, 0.0], 1.0, ("b", "a")),
    }


def test_breakdowns(results):
    found = breakdowns(results["val_id"])
    assert set(found) == {"adsorbate", "element", "size"}
    maes = {k: [(g["group"], g["count"], round(g["mae"], 9)) for g in v] for k, v in found.items()}
    assert maes["adsorbate"] == [("CO", 2, 0.255), ("H", 1, 0.1)]
    assert maes["size"] == [("1–10", 2, 0.255), ("11–20", 1, 0.1), ("201 or more", 1, 0.3)]
    assert maes["element"] == [
        ("Ni", 3, 0.3), ("C", 2, 0.255), ("O", 2, 0.255), ("H", 1, 0.1), ("Cu", 1, 0.01)
    ]  # fmt: skip
    assert found["adsorbate"][0]["ewt"] == 0.5
    assert found["adsorbate"][0]["mae_interval"] == pytest.approx([0.01, 0.5])
    assert breakdowns(results["val_ood_ads"]) == {}


def test_each_size_is_in_one_bin():
    names = [size_bin(n) for n in range(1, 230)]
    assert len(dict.fromkeys(names)) == 10
    assert sorted(names, key=names.index) == names
    assert (size_bin(200), size_bin(201)) == ("151–200", "201 or more")


def test_all_splits_together(results):
    joined = join_results(results)
    assert joined.sid == (0, 1, 2, 3, "b", "a")
    assert joined.columns["adsorbate"] == ("CO", "CO", "H", None, None, None)
    content = summarise(results, {"constant": {"val_id": 1.0}}, checkpoint="m")
    assert content["all"]["mae"] == pytest.approx((0.01 + 0.5 + 0.1 + 0.3 + 0.5) / 6)
    assert content["splits"]["val_id"]["median_ae"] == pytest.approx(0.2)
    assert content["checkpoint"] == "m"
    low, high = content["splits"]["val_id"]["intervals"]["mae"]
    assert low < content["splits"]["val_id"]["mae"] < high
    assert "all" not in summarise({"one": results["val_id"]})
    with pytest.raises(ValueError, match="no split"):
        summarise({})


def test_worst_systems_are_ranked_whatever_their_order(results):
    assert rank_worst(results, 3) == [("val_id", 1), ("val_ood_ads", 0), ("val_id", 3)]
    assert rank_worst({"s": result([1, -1, 1, 1], sid=("d", "c", "a", "b"))}, 2) == [
        ("s", 2),
        ("s", 3),
    ]
    worst = summarise(results)["worst"]
    assert len(worst) == 6
    assert worst[0] == {
        "split": "val_id", "sid": 1, "prediction": -0.5, "target": 0.0, "error": -0.5,
        "natoms": 10, "adsorbate": "CO", "elements": "C Ni O",
    }  # fmt: skip


def test_ewt_curve_is_strict_and_holds_the_metric():
    curve = ewt_curve(result([0.02, -0.02, 0.0199, 5.0]))
    at = dict(zip(curve["thresholds"], curve["fractions"], strict=True))
    assert at[0.02] == 0.25
    assert curve["fractions"][-1] == 1.0
    assert curve["fractions"] == sorted(curve["fractions"])


def test_table(results):
    content = summarise(results, {"constant": {"val_id": 1.0, "val_ood_ads": 0.25}})
    heading, first, second, together = report.table_rows(content)
    assert heading == [
        "split", "systems", "MAE (eV, 95 %)", "EwT (%, 95 %)", "RMSE", "median", "constant"
    ]  # fmt: skip
    low, high = content["splits"]["val_id"]["intervals"]["mae"]
    assert first[:3] == ["val_id", "4", f"0.2275 [{low:.4f}, {high:.4f}]"]
    assert first[3].startswith("25.00 [0.00, ")
    assert [second[-1], together[0], together[-1]] == ["0.2500", "all", "-"]
    lines = report.table(content).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == {"-", " "}


def test_rich_table_shows_brackets(results):
    from rich.console import Console

    console = Console(width=140)
    content = summarise(results)
    with console.capture() as capture:
        console.print(report.rich_table(content))
    low, high = content["splits"]["val_id"]["intervals"]["mae"]
    assert f"0.2275 [{low:.4f}, {high:.4f}]" in capture.get()


def test_files(results, tmp_path):
    content = summarise(results, checkpoint="m")
    path = report.write_json(content, tmp_path / "new" / "r.json")
    assert json.loads(path.read_text()) == content
    with report.write_csv(results, tmp_path / "p.csv").open(newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["split", "sid", "energy", "target", "natoms", "adsorbate", "elements"]
    assert rows[1]["adsorbate"] == "CO"
    assert [row["natoms"] for row in rows] == ["9", "10", "11", "300", "", ""]
    assert float(rows[1]["energy"]) == results["val_id"].prediction[1]
    with pytest.raises(TypeError):
        report.write_json({"a": object()}, path)
    assert json.loads(path.read_text()) == content


def test_a_split_called_like_all_of_them_is_refused(results):
    with pytest.raises(ValueError, match="'all', which stands for all splits together"):
        summarise({**results, "all": results["val_id"]})
    assert "all" in summarise({"all": results["val_id"]})["splits"]
