"""Where a checkpoint is, and what is said where there is none."""

import pytest

from flt_mol.training.finding import find_checkpoint


def runs(folder, *names, file="best.ckpt"):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / file).touch()
    return folder


def test_runs_inside_a_sweeps_folder_are_named_in_its_order(tmp_path):
    folder = runs(tmp_path / "swept", "seed=2", "seed=10", "seed=1")
    (folder / "sweep.csv").write_text("run,training.seed,val/mae\nseed=10,10,0.1\nseed=9,9,0.2\n")
    places = rf"{folder}/seed=10, {folder}/seed=1, {folder}/seed=2$"
    with pytest.raises(ValueError, match=f"in 3 folders inside: .*lowest validation.*: {places}"):
        find_checkpoint(folder)
    assert find_checkpoint(folder / "seed=1").name == "best.ckpt"


def test_many_folders_are_not_all_named(tmp_path):
    folder = runs(tmp_path / "all", *(f"m{i}" for i in range(1, 11)), file="model.safetensors")
    with pytest.raises(ValueError, match=rf"in 10 folders inside: give one of them: {folder}/m1, "):
        find_checkpoint(folder)
    with pytest.raises(ValueError, match=r"/m8 and 2 more$"):
        find_checkpoint(folder)


def test_nothing_inside(tmp_path):
    with pytest.raises(ValueError, match="give a .ckpt file, the folder of a run"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("spelt", ["flt_small", "FLT-small", "flt-smal"])
def test_a_shipped_model_is_named_where_it_was_nearly(spelt):
    with pytest.raises(ValueError, match=r"did you mean flt-small\? Else give a \.ckpt file"):
        find_checkpoint(spelt)
