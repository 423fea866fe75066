import argparse

import pytest

from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.speed.command import add_options, inserted, run
from flt_mol.analysis.speed.figures import (
    draw_lengths,
    draw_nothing,
    draw_one_system,
    draw_training_step,
)
from flt_mol.analysis.speed.layers import OURS
from flt_mol.analysis.speed.lengths import FLOOR
from flt_mol.analysis.speed.model_tables import (
    one_system_tables,
    parts_tables,
    training_step_tables,
)
from flt_mol.analysis.speed.parts import PARTS
from flt_mol.analysis.speed.points import Setting
from flt_mol.analysis.speed.records import Record
from flt_mol.analysis.speed.tables import conditions, lengths_tables, quotient
from flt_mol.analysis.speed.training_step import DENSE

RATES = {"flops": 2e11, "bytes": 1e10}
MACHINE = {"processor": "Abacus", "cores": 2, "torch": "2.9"}


def record(point, result, setting=None, stopped=None):
    return Record(
        point, setting or Setting(), result, stopped, dict(MACHINE), {"OMP_NUM_THREADS": "1"}
    )


def cells(table, first):
    """The cells of all rows whose first one is `first`."""
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[c.strip() for c in row[1:]] for row in rows if row[0].strip() == first]


def length(tokens, part="block", passes="forward"):
    seconds = {OURS: [0.010, 0.020], "performer-pytorch": [0.020, 0.050], FLOOR: [0.009, 0.018]}
    return record(
        {"tokens": tokens, "part": part, "passes": passes},
        {
            "seconds": seconds,
            "bytes": {OURS: 1e6, "performer-pytorch": 4e6},
            "floors": {OURS: {"roofline": 0.006}, "performer-pytorch": {"roofline": 0.006}},
            "stopped": ["softmax, dense bias"],
            "rates": RATES,
        },
    )


def test_the_table_over_lengths():
    records = [length(1024), length(128), length(1024, "core")]
    whole, section = lengths_tables(records)
    assert "Abacus, 2 cores, torch 2.9; 1 thread, CPU seconds; allocator: default" in section
    assert "sgemm ran at 200 GFLOP/s, copies at 10.0 GB/s" in whole
    times, memory = cells(section, "1,024")
    assert times == ["–", "–", "0.45", "–", "0.45", "–", "–", "0.90"]
    assert memory == ["–", "–", "0.25", "–", "0.25", "–", "–"]
    assert cells(section, "128")[0][4] == "–"  # no core of that length
    assert "0.450 (0.425–0.475)" in whole
    assert ["15", "35"] in [row for row in cells(whole, "1,024") if len(row) == 2]
    assert ["0.40", "0.17"] in [row for row in cells(whole, "1,024") if len(row) == 2]


def test_the_header_says_what_an_allocator_is():
    huge = record({}, {}, Setting(allocator="huge"))
    huge.machine["huge_pages"] = "never"
    given = "allocator: huge (transparent huge pages, of 2 MB, where Linux grants them), which are"
    assert f"{given} given: never, the same for all" in conditions([huge])
    kept = record({}, {}, Setting(allocator="keep"))
    assert "allocator: keep (freed memory stays with the process), the same" in conditions([kept])


def test_ratios_of_what_was_not_timed():
    assert quotient(None, OURS, FLOOR) == "–"
    assert quotient({"seconds": {OURS: [1.0]}}, OURS, FLOOR) == "–"
    assert quotient({"seconds": {OURS: [1.0], FLOOR: [4.0]}}, OURS, FLOOR) == "0.25"


def steps():
    return record(
        {},
        {
            "seconds": {"ours": [1.0, 2.0], DENSE: [2.0, 4.0]},
            "bytes": {"ours": 1e9, DENSE: 2e9},
            "atoms": {"ours": 2000, DENSE: 500, "graphormer3d-exact": 2000},
            "slabs": {"ours": 32, DENSE: 8, "graphormer3d-exact": 32},
            "weights": {"ours": 12345, DENSE: 7, "graphormer3d-exact": 7},
            "stopped": ["graphormer3d-exact"],
            "left_out": ["SchNet (PyG)"],
        },
    )


def test_the_table_of_steps():
    whole, section = training_step_tables([steps()])
    assert cells(section, "ours") == [
        ["12,345", "32", "1.5", "1,333", "1.00", "1,000", "500.0", "1.00"]
    ]
    # A quarter of the atoms in twice the time.
    assert cells(section, DENSE) == [["7", "8", "3", "167", "8.00", "2,000", "4,000.0", "8.00"]]
    assert cells(section, "graphormer3d-exact")[0][2] == "no memory"
    assert cells(section, "SchNet (PyG)") == []
    assert "8.000 (8.000–8.000)" in whole


def test_the_table_of_parts():
    floors = {"gemm": 0.001, "bytes": 0.0005, "roofline": 0.002}
    result = {
        "seconds": {name: [0.004] for name in PARTS},
        "bytes": dict.fromkeys(PARTS, 1e6),
        "floors": dict.fromkeys(PARTS, floors),
        "rates": RATES,
    }
    _, section = parts_tables([record({"passes": "training"}, result)])
    assert cells(section, "attention") == [["training", "4.00", "1.0", "1.00", "0.50", "0.50"]]


def systems():
    made = []
    for atoms in (1000, 4000, 16000):
        result = {"atoms": atoms, "pairs": 18 * atoms, "vectors": 9, "seconds": [1e-6 * atoms**1.5],
                  "pair_seconds": 0.25, "bytes": 100 * atoms, "rss": 10**8 + 200 * atoms,
                  "rss_before": 10**8}  # fmt: skip
        point = {"what": "model", "atoms": atoms, "passes": "forward"}
        made.append(record(point, result))
    point = {"what": "model", "atoms": 64000, "passes": "forward"}
    return [record(point, None, stopped="needs more than 20 GB"), *made]


def test_the_table_of_one_system():
    _, section = one_system_tables(systems())
    assert cells(section, "model, forward") == [["16,000", "1.500", "1.000", "1.000"]]
    assert cells(section, "4,000") == [["72,000", "9", "0.253", "63.2", "0.25", "0.000", "0.10"]]
    assert cells(section, "64,000")[0][2] == "needs more than 20 GB"


@pytest.mark.parametrize(
    ("draw", "records"),
    [
        (draw_lengths, [length(128), length(1024)]),
        (draw_training_step, [steps()]),
        (draw_one_system, systems()),
    ],
)
def test_pictures_show_what_was_measured(draw, records):
    pytest.importorskip("matplotlib")
    axes = draw(records).axes
    assert len(axes) == 2
    assert all(len(axis.lines) or len(axis.patches) == 2 for axis in axes)


def test_nothing_to_draw():
    assert draw_nothing([]) is None
    assert draw_training_step([record({}, None, stopped="needs more")]) is None


def test_a_page_keeps_what_stands_around():
    page = "a\n<!-- bench: x -->\n<!-- end -->\nb\n<!-- bench: y -->\nold\n<!-- end -->\n"
    once = inserted(page, "x", "new \\1")
    assert once == page.replace("x -->\n", "x -->\n\nnew \\1\n\n", 1)
    assert inserted(once, "x", "new \\1") == once
    with pytest.raises(ValueError, match="<!-- bench: z -->"):
        inserted(page, "z", "new")


def given(folder, *arguments):
    parser = argparse.ArgumentParser()
    add_options(parser, "one_system")
    return parser.parse_args(["--docs", str(folder), *arguments])


def test_rendering_writes_table_picture_and_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "speed.md").write_text("# Speed\n\n<!-- bench: one_system -->\n<!-- end -->\n")
    results = Results(tmp_path / "tables/bench_one_system.jsonl")
    for one in systems():
        line = {"bench": "one_system", "point": one.point, "setting": one.setting._asdict()}
        line |= {"stopped": one.stopped} if one.result is None else {"result": one.result}
        results.append({**line, "machine": one.machine, "environment": one.environment})
    run("one_system", given(tmp_path, "--render"), [], one_system_tables, draw_one_system)
    assert "Exponents" in capsys.readouterr().out
    page = (tmp_path / "speed.md").read_text("utf-8")
    assert "images/bench_one_system.png" in page
    assert "needs more than 20 GB" in page
    assert (tmp_path / "tables/bench_one_system.md").read_text("utf-8").startswith("# One")
    assert 0 < (tmp_path / "images/bench_one_system.png").stat().st_size < 150_000


def test_nothing_measured_is_said(tmp_path, capsys):
    run("one_system", given(tmp_path, "--render"), [], one_system_tables, draw_one_system)
    assert "nothing measured in" in capsys.readouterr().out
