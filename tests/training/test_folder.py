"""The folder of a run: whose it is, who may write, what is left."""

from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from flt_mol.training import folder as module
from flt_mol.training.folder import run_folder, written_files
from flt_mol.training.processes import World

SETTINGS = {"model": {"width": 8}, "training": {"epochs": 3, "save_minutes": 10.0}}
ALONE = World()
OTHER = {"model": {"width": 8, "depth": 1}, "training": {"epochs": 4, "save_minutes": 1.0}}


def fail(folder, error, *files, settings=SETTINGS):
    """The error of a run that wrote some files."""

    def run():
        with run_folder(str(folder), "run", settings, ALONE) as held:
            for file in files:
                (held / file).parent.mkdir(exist_ok=True)
                (held / file).touch()
            raise error

    with pytest.raises(type(error)) as caught:
        run()
    return caught.value


def held(folder, settings=SETTINGS):
    with run_folder(str(folder), "run", settings, ALONE) as found:
        return found


def interrupted(folder, settings=SETTINGS):
    fail(folder, KeyboardInterrupt(), "resume.ckpt", settings=settings)


def finished(folder, settings=SETTINGS):
    with run_folder(str(folder), "run", settings, ALONE) as held:
        (held / "last.ckpt").touch()


def test_a_new_folder_holds_the_settings(tmp_path):
    with run_folder(str(tmp_path / "a" / "run"), "run", SETTINGS, ALONE) as held:
        assert yaml.safe_load((held / "config.yaml").read_text()) == SETTINGS
    assert written_files(held) == (held / "config.yaml",)


def test_an_interrupted_run_is_resumed(tmp_path):
    interrupted(tmp_path / "run")
    with run_folder(str(tmp_path / "run"), "run", SETTINGS, ALONE) as held:
        assert [path.name for path in held.glob("resume.*")] == ["resume.ckpt"]


def test_other_settings_are_refused_with_their_keys(tmp_path):
    interrupted(tmp_path / "run")
    with pytest.raises(ValueError, match=r"model\.depth=.*training\.epochs=3, here 4") as error:
        held(tmp_path / "run", OTHER)
    assert "save_minutes" not in str(error.value)
    (tmp_path / "run" / "config.yaml").write_text("{")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        held(tmp_path / "run")


def test_weights_of_something_else_are_not_overwritten(tmp_path):
    (tmp_path / "best.ckpt").touch()
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read.*choose another output"):
        held(tmp_path)


def test_an_older_run_that_states_no_tag_rule_is_resumed(tmp_path):
    stated = [{**SETTINGS, "data": {"tag_rule": rule}} for rule in (None, "half", "oc20")]
    for before, accepted in ((stated[0], True), (stated[1], True), (stated[2], False)):
        folder = tmp_path / str(before["data"]["tag_rule"])
        interrupted(folder)
        (folder / "config.yaml").write_text(yaml.safe_dump(before))
        if accepted:
            assert held(folder, stated[1]) == folder
        else:
            with pytest.raises(ValueError, match=r"data\.tag_rule=oc20, here half"):
                held(folder, stated[1])


def test_a_finished_run_is_found(tmp_path):
    finished(tmp_path / "run")
    assert held(tmp_path / "run") == tmp_path / "run"
    with pytest.raises(ValueError, match="holds a run with other settings"):
        held(tmp_path / "run", OTHER)


@pytest.mark.parametrize("output", ["file", "file/run"])
def test_outputs_that_cannot_be_written(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="output"):
        held(output)


def test_numbered_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished("runs/mine")
    interrupted("runs/mine-2", OTHER)
    interrupted("runs/mine-3")
    with run_folder(None, "mine", SETTINGS, ALONE) as held:
        assert held == Path("runs/mine-3")
        assert (held / "resume.ckpt").exists()
        monkeypatch.setattr(module, "_WAIT", 0.0)
        with run_folder(None, "mine", SETTINGS, ALONE) as beside:
            assert beside == Path("runs/mine-4")


def test_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WAIT", 0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        FileLock(folder / ".training.lock"),
        pytest.raises(ValueError, match="another process"),
        run_folder(str(folder), "run", SETTINGS, ALONE),
    ):
        pass


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()])
def test_a_failure_without_weights_leaves_nothing(tmp_path, error):
    fail(tmp_path / "run", error, "logs/a")
    assert not (tmp_path / "run").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    fail(mine, error, "logs/a", "best")
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_weights_are_kept_and_named(tmp_path):
    error = fail(tmp_path / "run", KeyboardInterrupt(), "best.ckpt", "resume.ckpt")
    notes = " ".join(error.__notes__)
    assert str(tmp_path / "run" / "best.ckpt") in notes
    assert "resume" in notes
    assert (tmp_path / "run" / "best.ckpt").exists()
