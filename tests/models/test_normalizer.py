import math

import pytest
import torch

from flt_mol.models.energy import Normalizer


def test_mean_and_population_spread():
    normalizer = Normalizer()
    normalizer.fit(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64))
    assert normalizer.mean.item() == pytest.approx(3.0)
    assert normalizer.std.item() == pytest.approx(math.sqrt(14 / 3))
    assert normalizer.denormalize(torch.tensor(1.0)).item() == pytest.approx(3 + math.sqrt(14 / 3))


@pytest.mark.parametrize("targets", [[2.0], [2.0, 2.0, 2.0]])
def test_no_spread_falls_back_to_one(targets):
    normalizer = Normalizer()
    with pytest.warns(UserWarning, match="std is set to 1"):
        normalizer.fit(torch.tensor(targets))
    assert normalizer.mean.item() == 2.0
    assert normalizer.std.item() == 1.0


@pytest.mark.parametrize("targets", [[], [1.0, math.nan], [math.inf]])
def test_targets_that_give_no_normaliser(targets):
    with pytest.raises(ValueError, match="normaliser"):
        Normalizer().fit(torch.tensor(targets))


def test_pieces_that_are_never_held_together():
    normalizer, pieces = Normalizer(), Normalizer()
    targets = torch.tensor([1.0, 2.0, 6.0, -4.0, 0.5], dtype=torch.float64)
    normalizer.fit(targets)
    pieces.fit(part for part in targets.split(2))
    assert pieces.mean.item() == pytest.approx(normalizer.mean.item(), rel=1e-7)
    assert pieces.std.item() == pytest.approx(normalizer.std.item(), rel=1e-7)
    with pytest.raises(ValueError, match="not finite"):
        pieces.fit([targets, torch.tensor([math.nan])])
    with pytest.raises(ValueError, match="at least one"):
        pieces.fit([])


def test_targets_beyond_float32():
    with pytest.raises(ValueError, match=r"mean 1e\+300.*no energy"):
        Normalizer().fit(torch.tensor([1e300, 1e300], dtype=torch.float64))


def test_it_is_saved():
    first, second = Normalizer(), Normalizer()
    first.fit(torch.tensor([1.0, 5.0]))
    second.load_state_dict(first.state_dict())
    assert (second.mean.item(), second.std.item()) == (3.0, 2.0)
