"""Trainings killed at random moments; `python -m helpers.kill_training` kills more."""

import pytest

from helpers.kill_training import disturbed_run, kill_trainings

pytestmark = pytest.mark.slow


def test_killed_trainings_resume_to_the_same_weights(tmp_path):
    kept = []
    for _, steps, files in kill_trainings(disturbed_run(tmp_path), tmp_path, 6):
        assert files == []
        kept.append(steps)
    assert any(steps for steps in kept), "some were killed after their first step"
