import pytest
import torch

from flt_mol.analysis import timing
from flt_mol.analysis.timing import Ratio, Timings, interleaved, one_thread, peak_memory


class Clock:
    """A process clock that runs only when told to."""

    def __init__(self):
        self.now = 0.0

    def process_time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_functions_take_turns_in_alternating_order_after_one_call_each(clock):
    calls = []
    timings = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(times) for name, times in timings.seconds.items()} == {"a": 3, "b": 3}


def test_seconds_are_those_of_one_call(clock):
    def work():
        clock.now += 0.002

    timings = interleaved({"work": work}, 2, at_least=0.01)
    assert timings.seconds["work"] == pytest.approx([0.002, 0.002])
    # One to warm up, one to see how long it takes, then two rounds of five.
    assert clock.now == pytest.approx(0.002 * (2 + 2 * 5))


def test_a_machine_that_slows_down_leaves_ratios_alone(clock):
    slowness = 1.0

    def work(seconds):
        nonlocal slowness
        slowness *= 1.5
        clock.now += seconds * slowness

    timings = interleaved({"a": lambda: work(3.0), "b": lambda: work(1.0)}, 101)
    # Twice as often before as after the other: √(4.5 · 2) = 3.
    ratio = timings.ratio("a", over="b")
    assert ratio.low * ratio.high == pytest.approx(9.0)
    assert timings.median("a") > 0


def test_a_ratio_is_the_median_of_the_ratios_and_has_quartiles():
    timings = Timings({"a": [2.0, 3.0, 8.0, 5.0, 1.0], "b": [1.0, 1.0, 2.0, 1.0, 1.0]})
    assert timings.ratio("a", over="b") == Ratio(3.0, 2.0, 4.0)
    assert timings.median("a") == 3.0
    assert str(timings.ratio("a", over="b")) == "3.000 (2.000–4.000)"
    assert Timings({"a": [2.0], "b": [1.0]}).ratio("a", over="b") == Ratio(2.0, 2.0, 2.0)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    seen = []

    @one_thread()
    def stop():
        seen.append(torch.get_num_threads())
        raise RuntimeError("stop")

    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="stop"):
            stop()
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("functions", "rounds"), [({}, 3), ({"a": int}, 0)])
def test_nothing_to_time_is_refused(functions, rounds):
    with pytest.raises(ValueError, match="a function and a round"):
        interleaved(functions, rounds)


def test_peak_memory_counts_what_is_held_at_once():
    x = torch.ones(1000, dtype=torch.float64)  # held before: not counted

    def one_after_the_other():
        for _ in range(3):
            x.exp()

    def together():
        return [x.exp() for _ in range(3)]

    assert peak_memory(one_after_the_other) == 8000
    assert peak_memory(together) == 24000


def test_peak_memory_sees_a_peak_in_the_middle_and_the_backward_pass():
    x = torch.ones(500, dtype=torch.float32, requires_grad=True)

    def square():
        y = x * x  # 2000 held
        seed = torch.ones_like(y)  # 4000
        return torch.autograd.grad(y, x, seed)  # two products of 2000 before their sum

    assert peak_memory(square) >= 8000
    assert peak_memory(lambda: torch.zeros(0)) == 0
