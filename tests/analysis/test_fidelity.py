import math

import pytest
import torch

from flt_mol.analysis.fidelity import (
    AVERAGE,
    NO_MASK,
    Candidate,
    Conditions,
    Problem,
    candidates,
    errors,
    exact_output,
    fidelity_markdown,
    fidelity_rows,
    fitted,
    linear_errors,
    marked,
    yardsticks,
)
from flt_mol.functional import relative_mask, softmax_attention

EASY = Conditions(scale=0.1, magnitude=0.1, num_frequencies=4, atoms=20, num_heads=3)


def test_the_error_is_a_ratio_of_norms_per_head():
    exact = torch.tensor([[[3.0, 0.0], [1.0, 0.0]], [[0.0, 4.0], [0.0, 1.0]]])
    out = exact.clone()
    out[0, 0, 1] = 1.0
    torch.testing.assert_close(errors(out, exact), torch.tensor([0.2, 0.0]))


def test_problems_are_what_their_conditions_say():
    conditions = Conditions(head_dim=64, scale=2.0, magnitude=3.0, atoms=100, num_frequencies=64)
    rows = Problem(conditions).draw(2)
    assert rows.ptr.tolist() == [0, 100, 200]
    assert rows.query.std().item() == pytest.approx(2.0, abs=0.05)
    assert rows.key.std().item() == pytest.approx(2.0, abs=0.05)
    assert rows.value.std().item() == pytest.approx(1.0, abs=0.02)
    mask = relative_mask(rows.query_at.query, rows.key_at.key)
    torch.testing.assert_close(mask.diagonal(dim1=1, dim2=2), torch.full((8, 200), 3.0))
    assert not torch.equal(rows.query, Problem(conditions, seed=1).draw(2).query)
    torch.testing.assert_close(rows.query, Problem(conditions).draw(2).query, rtol=0, atol=0)


def test_the_waves_are_those_of_a_gaussian_of_two_angstrom():
    problem = Problem(Conditions(num_frequencies=4096))
    deviations = problem.frequencies.std(0) * 2 * math.pi * 2.0
    torch.testing.assert_close(deviations, torch.ones(3), rtol=0, atol=0.05)


@pytest.mark.parametrize("split", ["one_sided", "balanced", "symmetric"])
def test_the_truth_is_softmax_with_the_sampled_mask(split):
    rows = Problem(EASY._replace(magnitude=2.0, split=split)).draw()
    bias = relative_mask(rows.query_at.query, rows.key_at.key)
    expected = softmax_attention(rows.query, rows.key, rows.value, rows.ptr, bias)
    torch.testing.assert_close(exact_output(None, rows), expected)


def test_yardsticks_of_known_size():
    """Without mask leaving it out is exact; without logits so is the average."""
    bare = yardsticks(Problem(EASY._replace(scale=1.0, magnitude=0.0)).draw())
    assert bare[NO_MASK].max() < 1e-5
    assert bare[AVERAGE].min() > 0.1
    flat = yardsticks(Problem(EASY._replace(scale=0.0, magnitude=0.0)).draw())
    assert flat[AVERAGE].max() < 1e-5
    one = yardsticks(Problem(EASY._replace(atoms=1)).draw(3))
    assert one[AVERAGE].max() < 1e-5  # three systems of one atom: the average is within systems


def test_random_features_err_as_one_over_the_root_of_their_number():
    found = {}
    for count in (64, 4096):
        sample = []
        for seed in range(4):
            problem = Problem(EASY, seed)
            rows = problem.draw()
            phi = problem.feature_map("softmax", num_features=count, orthogonal=False)
            sample.append(linear_errors(phi, rows))
        found[count] = torch.cat(sample).square().mean().sqrt().item()
    assert found[64] / found[4096] == pytest.approx(8.0, rel=0.3)


def test_a_fit_brings_a_learned_map_near_to_the_softmax():
    problem = Problem(EASY._replace(scale=0.5, magnitude=1.0))
    rows = problem.draw(4)
    phi = problem.feature_map("softplus", num_features=32)
    before = linear_errors(phi, rows).detach().median()
    assert fitted(phi, problem, steps=200) is phi
    after = linear_errors(phi, rows).detach().median()
    assert after < 0.7 * before
    assert after < yardsticks(rows)[NO_MASK].median()


def test_the_table_has_yardsticks_every_map_and_a_column_for_each_condition():
    conditions = [EASY, EASY._replace(magnitude=1.0)]
    maps = candidates(features=(8,), most=16)
    table = fidelity_rows(conditions, maps, draws=2, steps=3)
    assert list(table)[:2] == [NO_MASK, AVERAGE]
    assert len(table) == 2 + len(maps)
    assert all(len(values) == 2 for values in table.values())
    assert all(math.isfinite(value) for values in table.values() for value in values)
    assert "elu, M = 24" in table  # 2R + D
    text = fidelity_markdown(table, conditions)
    assert "s = 0.1, f(0) = 1" in text
    assert text.count("\n") == 1 + len(table)


def test_medians_are_over_all_draws_and_heads():
    candidate = Candidate("relu", "relu", 8, True)
    table = fidelity_rows([EASY], [candidate], draws=3)
    sample = []
    for seed in range(3):
        problem = Problem(EASY, seed)
        rows = problem.draw()
        phi = problem.feature_map("relu", num_features=8, orthogonal=True)
        sample.append(linear_errors(phi, rows))
    assert table["relu, M = 8"] == [torch.cat(sample).median().item()]


def test_marks_say_which_simpler_answer_is_nearer():
    table = {NO_MASK: [0.3, 0.3, 0.9], AVERAGE: [0.9, 0.9, 0.5], "a map": [0.2, 0.5, 0.7]}
    assert marked(table)["a map"] == ["0.20", "0.50 †", "0.70 ‡"]
    assert marked(table)[AVERAGE] == ["0.90", "0.90", "0.50"]
