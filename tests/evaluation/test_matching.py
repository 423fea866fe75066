"""Predictions and targets in files: read, refused, brought together."""

import gzip
import json
import os
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.energy_tables import TARGET, read_energies, read_ids
from flt_mol.evaluation.matching import median_baseline, score_files
from flt_mol.evaluation.metrics import metrics_of
from flt_mol.evaluation.report import write_csv
from flt_mol.predict import Prediction, write_predictions

REAL = os.environ.get("FLT_MOL_TEST_DATA")


@pytest.fixture
def file(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


TARGETS = "split,index,sid,y_relaxed\na,0,11,-1.5\na,1,s-2,0.5\nb,0,13,2.0\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", "sid,energy\n13,2.5\n11,-1.49\ns-2,0\n"),
        ("p.csv.gz", "\ufeffsid,energy\r\n\r\n11,-1.49\r\n13,2.5\r\n s-2 ,0\r\n"),
        ("p.csv", "energy;sid;note\n-1.49;11;x\n0;s-2;\n2.5;13;z\n"),
        ("p.tsv", "split\tsid\tprediction\na\t11\t-1.49\nb\t13\t2.5\na\ts-2\t0"),
        ("p.json", '[{"sid": 11, "energy": -1.49}, {"sid": "s-2", "energy": 0}, '
                   '{"sid": 13, "energy": 2.5}]'),
    ],
)  # fmt: skip
def test_tables_of_all_kinds_are_matched_by_sid(file, name, text):
    results = score_files(file(name, text), file("t.csv.gz", TARGETS))
    assert list(results) == ["a", "b"]
    assert results["a"].sid == ("11", "s-2")
    assert results["a"].prediction.tolist() == [-1.49, 0.0]
    assert results["a"].target.tolist() == [-1.5, 0.5]
    assert results["a"].metrics["ewt"] == 0.5
    assert results["b"].metrics["mae"] == 0.5


def test_what_this_library_writes_is_read(tmp_path, file):
    predictions = [Prediction("11", 1 / 3, "f, 1"), Prediction("s-2", 0.1, 'f"2')]
    targets = file("t.csv", "sid,energy\n11,0\ns-2,0\n")
    for name in ("p.csv", "p.json"):
        path = write_predictions(predictions, tmp_path / name)
        (result,) = score_files(path, targets).values()
        assert result.prediction.tolist() == [1 / 3, 0.1]
    assert list(score_files(path, targets)) == ["t"]
    target = np.array([1.0, 2.0])
    own = SplitResult(
        ("11", "12"), target + 0.3, target, metrics_of(target + 0.3, target), columns={
            "natoms": (4, 90), "adsorbate": ("CO", None), "elements": ("C O", "Cu")}
    )  # fmt: skip
    csv = write_csv({"a": own, "b": own}, tmp_path / "own.csv")
    again = score_files(csv)
    assert again["b"].columns == own.columns
    assert again["b"].metrics == own.metrics
    assert score_files(csv, csv)["a"].target.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sid,energy\n11,1_0\n", r"p\.csv, line 2, sid 11: energy is '1_0', expected a finite"),
        ("sid,energy\n11,-1e155\n", r"p\.csv, line 2, sid 11: .*no energy of a structure"),
        ("sid,energy\n11,nan\n", r"p\.csv, line 2, sid 11: energy is 'nan', expected a finite"),
        ("sid,energy\n11,1e999\n", "line 2, sid 11: energy is '1e999'"),
        ("sid,energy\n11,\n", "line 2, sid 11: energy is ''"),
        ("sid,energy\n11,1.5 eV\n", "sid 11: energy is '1.5 eV'"),
        ("sid,energy\n11,1\n\n11,2\n", r"line 4, sid 11: the energy is 2\.0, and 1\.0 in line 2"),
        ("sid,energy\n11,1,5\n", r"line 2: 3 columns \(11, 1, 5\), expected 2"),
        ("sid,energy\n,1\n", "line 2: the sid is empty"),
        ("split,sid,energy\n,11,1\n", "line 2, sid 11: the split is empty"),
        ("id,energy\n11,1\n", "the columns are id, energy; expected sid and energy or"),
        ("sid,target\n11,1\n", "expected sid and energy or"),
        ("sid,energy,sid\n11,1,2\n", "two columns are called 'sid'"),
        ("sid,energy\n", "holds no energies"),
        ("", "holds no energies"),
        ('sid,energy\n"11,1\n', r"p\.csv, line 2: unexpected end of data"),
        ("sid,energy\n11,0\ns-2,0\n", r"has no prediction for sid 13 of b in .*t\.csv$"),
        ("sid,energy\n11,0\ns-2,0\n13,1\n14,1\n", r"without a target, sid 14 \(first in line 5\)"),
        ("sid,energy\n11.0,0\ns-2,0\n13,1\n", "write sids as whole numbers"),
        ("split,sid,energy\na,11,0\na,s-2,0\n", r"for sid 13 of b .*leave these .*--split a\)"),
        ("split,sid,energy\na,11,0\nb,s-2,0\nb,13,0\n", "no prediction for sid s-2 of a"),
        ("split,sid,energy\na,11,0\nc,11,0\n", "sid 13 of b .*sid 11 of c"),
    ],
)
def test_refusals_name_file_line_and_sid(file, text, match):
    with pytest.raises(ValueError, match=match):
        score_files(file("p.csv", text), file("t.csv", TARGETS))


def test_an_id_in_two_splits_needs_a_column(file):
    targets = file("t.csv", TARGETS + "b,1,11,3\n")
    with pytest.raises(ValueError, match=r"t\.csv, line 5, sid 11 of b: .* also in a, line 2"):
        score_files(file("p.csv", "sid,energy\n11,0\ns-2,0\n13,1\n"), targets)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x1f\x8b\x08broken"])
def test_damaged_files_are_named(tmp_path, content):
    path = tmp_path / "p.csv.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.csv\.gz is (no text|cut off)"):
        read_energies(path)
    with pytest.raises(ValueError, match="none.csv does not exist"):
        read_energies(tmp_path / "none.csv")
    for text, match in (("{", "is no JSON"), ("[1]", "a list of objects"), ("[]", "no energies")):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            read_energies(tmp_path / "p.json")


def test_equal_repetitions_are_dropped_and_counted(file):
    repeated = file("p.csv", "sid,energy\n11,0\ns-2,0\n13,1\n11,0.0\n13,1\n")
    with pytest.warns(UserWarning, match=r"p\.csv: dropped 2 lines that repeat an id"):
        results = score_files(repeated, file("t.csv", TARGETS))
    assert sum(r.metrics["count"] for r in results.values()) == 3


def test_splits_are_chosen(file):
    predictions = file("p.csv", "split,sid,energy\na,11,0\na,s-2,0\n")
    targets = file("t.csv", TARGETS)
    assert list(score_files(predictions, targets, ["a"])) == ["a"]
    assert list(score_files(file("q.csv", "sid,energy\n13,0\n"), targets, ["b"])) == ["b"]
    with pytest.raises(ValueError, match=r"p\.csv: no split 'b'; there are: a"):
        score_files(predictions, targets, ["b"])
    plain = file("q.csv", "sid,energy\n13,0\n")
    with pytest.raises(ValueError, match="there is no column split"):
        score_files(plain, plain, ["b"])


def test_targets_go_by_their_own_name_first(file):
    path = file("t.csv", "sid,energy,y_relaxed,target\n1,1,2,3\n")
    assert read_energies(path, TARGET).energies == {("", "1"): 3.0}
    assert read_energies(path).energies == {("", "1"): 1.0}


def test_ids(file):
    assert read_ids(file("i.csv", "sid,split\n1,a\n2,a\n1,b\n")) == {"a": ["1", "2"], "b": ["1"]}
    for text, match in (
        ("sid,split\n1,a\n1,a\n", "line 3: sid 1 is in line 2, too"),
        ("sid\n1\n", "expected sid and split"),
        ("sid,split\n,a\n", "line 2: .* is empty"),
        ("sid,split\n", "holds no ids"),
    ):
        with pytest.raises(ValueError, match=match):
            read_ids(file("i.csv", text))


ENERGIES = st.floats(-10, 10)


@given(st.dictionaries(st.integers(0, 99), st.tuples(ENERGIES, ENERGIES), min_size=1), st.randoms())
def test_the_order_of_lines_changes_nothing(tmp_path_factory, pairs, random):
    folder = tmp_path_factory.mktemp("p")
    lines = [f"{sid},{p!r}\n" for sid, (p, _) in pairs.items()]
    (folder / "p.csv").write_text("sid,energy\n" + "".join(random.sample(lines, len(lines))))
    (folder / "t.csv").write_text(
        "sid,energy\n" + "".join(f"{sid},{t!r}\n" for sid, (_, t) in pairs.items())
    )
    (result,) = score_files(folder / "p.csv", folder / "t.csv").values()
    assert result.metrics == metrics_of(*zip(*pairs.values(), strict=True))


@pytest.mark.skipif(not REAL, reason="FLT_MOL_TEST_DATA is not set")
def test_medians_of_the_validation_splits_of_oc20(tmp_path, capsys):
    """By the command, on all 99,854 systems: the numbers published with the targets."""
    from flt_mol.cli import main

    targets = Path(REAL) / "oc20" / "val_targets.csv.gz"
    energies = read_energies(targets, TARGET).energies
    assert len(energies) == 99_854
    by_split: dict[str, list[float]] = {}
    for (split, _), energy in energies.items():
        by_split.setdefault(split, []).append(energy)
    medians = {split: statistics.median(values) for split, values in by_split.items()}
    lines = [f"{sid},{medians[split]!r}\n" for split, sid in sorted(energies)]
    (tmp_path / "medians.csv").write_text("sid,energy\n" + "".join(lines))
    arguments = ["--predictions", str(tmp_path / "medians.csv"), "--targets", str(targets)]
    assert main(["evaluate", *arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    found = {split: round(m["mae"], 3) for split, m in content["splits"].items()}
    assert found == {
        "val_id": 1.744, "val_ood_ads": 1.714, "val_ood_cat": 1.733, "val_ood_both": 1.474
    }  # fmt: skip
    assert round(100 * content["splits"]["val_id"]["ewt"], 2) == 0.71
    own = content["baselines"]["own median"]
    assert own == {split: pytest.approx(m["mae"]) for split, m in content["splits"].items()}
    assert content["all"]["count"] == 99_854


def test_the_median_is_the_best_constant(file):
    results = score_files(
        file("p.csv", "sid,energy\n1,0\n2,0\n3,0\n"), file("t.csv", "sid,energy\n1,0\n2,1\n3,5\n")
    )
    assert median_baseline(results) == {"t": pytest.approx(5 / 3)}
