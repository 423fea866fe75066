import subprocess
import sys

import numpy as np
import pytest

from flt_mol.evaluation import plots
from flt_mol.evaluation.metrics import EnergyMetrics
from flt_mol.evaluation.splits import SplitResult


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved, for a look inside."""
    kept = []
    save = plots._save
    monkeypatch.setattr(
        plots, "_save", lambda figure, path: (kept.append(figure), save(figure, path))[1]
    )
    return kept


def split(prediction, target):
    metrics = EnergyMetrics()
    metrics.update(prediction, target)
    prediction, target = (np.asarray(v, dtype=np.float64) for v in (prediction, target))
    return SplitResult(tuple(range(len(target))), prediction, target, metrics.compute())


def texts(axis):
    return [text.get_text() for text in axis.texts]


def within_figure(figure):
    """All labels and titles lie on the canvas and on no other panel's title."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = []
    for axis in figure.axes:
        if not axis.axison:
            continue
        for artist in (axis.title, axis.xaxis.label, axis.yaxis.label):
            if artist.get_text():
                box = artist.get_window_extent(renderer)
                assert box.x0 >= 0
                assert box.y0 >= 0
                assert box.x1 <= figure.bbox.x1
                assert box.y1 <= figure.bbox.y1
                boxes.append(box)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_learning_curve(tmp_path, figures):
    history = [
        {"epoch": e, "train/mae": 10.0 / e, "val/mae": v}
        for e, v in enumerate([3.0, 2.0, 0.5, 0.6], start=1)
    ]
    path = plots.learning_curve(history, tmp_path / "new" / "curve.png")
    assert is_png(path)
    (axis,) = figures[0].axes
    assert axis.get_yscale() == "log"
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("epoch", "MAE (eV)")
    train, validation, best = axis.lines
    assert train.get_ydata().tolist() == [10.0, 5.0, 10 / 3, 2.5]
    assert validation.get_xdata().tolist() == [1, 2, 3, 4]
    assert best.get_label() == "best: 0.5 eV at epoch 3"
    within_figure(figures[0])


def test_scale_stays_linear_within_a_decade_and_below_zero(tmp_path, figures):
    for values in ([9.0, 1.0], [9.0, 0.0]):
        history = [{"epoch": e, "train/mae": v, "val/mae": 5.0} for e, v in enumerate(values)]
        plots.learning_curve(history, tmp_path / "curve.png")
    assert [figure.axes[0].get_yscale() for figure in figures] == ["linear", "linear"]


def test_rows_of_a_csv_log(tmp_path, figures):
    """Texts, empty entries, NaN, and the metrics of one epoch on several rows."""
    history = [
        {"epoch": "0", "step": "9", "loss": "0.5", "mae": ""},
        {"epoch": "0", "step": "9", "loss": "", "mae": "2.5"},
        {"epoch": "1", "step": "19", "loss": "nan", "mae": "2.0"},
        {"epoch": "", "step": "19", "loss": "7.0", "mae": None},
    ]
    plots.learning_curve(
        history, tmp_path / "c.png", loss="loss", validation="mae", loss_unit="standard deviations"
    )
    above, below = figures[0].axes
    assert above.get_ylabel() == "loss (standard deviations)"
    assert above.lines[0].get_ydata().tolist() == [0.5]
    assert below.get_ylabel() == "MAE (eV)"
    assert below.lines[0].get_ydata().tolist() == [2.5, 2.0]
    within_figure(figures[0])


@pytest.mark.parametrize("history", [[], [{"epoch": 1}], [{"epoch": 1, "val/mae": float("nan")}]])
def test_nothing_to_plot(tmp_path, history):
    with pytest.raises(ValueError, match="no row of the history has 'epoch'"):
        plots.learning_curve(history, tmp_path / "curve.png")
    with pytest.raises(ValueError, match="no split"):
        plots.parity({}, tmp_path / "parity.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_parity(tmp_path, figures, count):
    results = {
        f"val_ood_both_{i}": split([0.0, 1.0, 2.0 + i], [0.5, 1.0, 2.0]) for i in range(count)
    }
    path = plots.parity(results, tmp_path / "parity.png")
    assert is_png(path)
    shown = [axis for axis in figures[0].axes if axis.axison]
    assert len(shown) == count
    assert shown[-1].get_title() == (
        f"val_ood_both_{count - 1}\nMAE {(0.5 + count - 1) / 3:.3f} eV, 3 systems"
    )
    for axis in shown:
        assert axis.get_xlim() == axis.get_ylim() == shown[0].get_xlim()
        assert axis.get_aspect() == 1.0
        assert list(axis.lines[0].get_xdata()) == list(axis.lines[0].get_ydata())
    assert shown[0].get_ylabel() == "prediction (eV)"
    assert shown[-1].get_xlabel() == "target (eV)"
    within_figure(figures[0])


def test_far_predictions_are_counted_not_dropped(tmp_path, figures):
    results = {"val_id": split([0.0, 1.0, 1e6, -1e6, 2e6], [0.0, 1.0, 2.0, 3.0, 4.0])}
    plots.parity(results, tmp_path / "parity.png")
    (axis,) = figures[0].axes
    assert axis.get_xlim()[1] < 10
    assert texts(axis) == ["3 predictions beyond the axes"]
    assert sum(len(collection.get_offsets()) for collection in axis.collections) == 5


def test_many_points_become_a_density(tmp_path, figures):
    target = np.linspace(-5, 5, plots._MANY + 1)
    plots.parity({"a": split(target + 0.1, target)}, tmp_path / "p.png")
    (axis,) = figures[0].axes
    assert "brighter: more systems (log)" in texts(axis)
    within_figure(figures[0])


def test_one_system_and_equal_energies(tmp_path, figures):
    plots.parity({"a": split([1.0], [1.0])}, tmp_path / "p.png")
    assert figures[0].axes[0].get_title().endswith("1 system")
    plots.learning_curve([{"epoch": 1, "val/mae": 1.0}], tmp_path / "c.png")
    low, high = figures[1].axes[0].get_xlim()
    assert high - low >= 1
    assert [tick for tick in figures[1].axes[0].get_xticks() if low < tick < high] == [1]


def test_pyplot_and_the_backend_are_left_alone(tmp_path):
    code = (
        "import sys, matplotlib; matplotlib.use('pdf', force=False); "
        "from flt_mol.evaluation.plots import learning_curve; "
        f"learning_curve([{{'epoch': 1, 'val/mae': 1.0}}], {str(tmp_path / 'c.png')!r}); "
        "print('matplotlib.pyplot' in sys.modules, matplotlib.get_backend().lower())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "pdf"]
