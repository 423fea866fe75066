import os
import signal
import subprocess
import sys
import warnings

import pytest

import flt_mol
from flt_mol.cli import main
from flt_mol.cli.console import check_output, say
from flt_mol.files import NoteWarning

COMMANDS = [
    [],
    ["train"],
    ["evaluate"],
    ["predict"],
    ["export"],
    ["submission"],
    ["submission", "make"],
    ["submission", "check"],
    ["data"],
    *(["data", name] for name in ("inspect", "convert", "split", "download", "verify")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_a_help_that_fits(command, capsys):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: {' '.join(['flt-mol', *command])} ")
    assert max(map(len, text.splitlines())) <= 100


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flt_mol {flt_mol.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "trian"),
        (["predict", "emt-small"], "files"),
        (["predict", "emt-small", "x.traj", "--bath-size", "2"], "--bath-size"),
        (["predict", "emt-small", "x.traj", "--batch-size", "0"], "--batch-size"),
        (["predict", "emt-small", "x.traj", "--ensemble"], "--ensemble"),
        (["predict", "emt-small", "none.traj"], "none.traj"),
        (["predict", "emt_smal", "none.traj"], "emt_smal"),
        (["predict", "emt-small", "none.traj", "--device", "cuda:99"], "cuda:99"),
        (["predict", "emt-small", "x.traj", "--surface", "half"], "--tag-slab"),
        (["predict", "emt-small", "x.traj", "-o", "x.txt"], "x.txt"),
        (["predict", "emt-small", "x.csv", "-o", "x.csv"], "x.csv"),
        (["evaluate"], "--predictions"),
        (["evaluate", "emt-small", "--targets", "t.csv"], "--targets"),
        (["evaluate", "--predictions", "p.csv", "--data", "d"], "--data"),
        (["evaluate", "emt-small", "--split", "vall"], "vall"),
        (["submission", "check", "none.npz"], "none.npz"),
        (["submission", "check", "none.npz", "--ids", "i", "--data", "d"], "--ids"),
        (["submission", "check", "none.npz", "--data", "oc21"], "oc21"),
        (["data", "inspect", "none.lmdb"], "none.lmdb"),
        (["data", "inspect", "emt_adsorption"], "--split"),
        (["data", "split", "x.lmdb", "new", "--shares", "train"], "train"),
        (["data", "split", "x.lmdb", "new", "--shares", "a=0.5", "a=0.5"], "more than once"),
        (["data", "verify", "oc21"], "oc21"),
        (["data", "download", "emt_adsorption"], "emt_adsorption"),
        (["train", "no-such-run"], "no-such-run"),
        (["train", "quickstart", "training.epocs=1"], "epocs"),
        (["export", "emt-small", "pyproject.toml/sub"], "pyproject.toml"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert error.startswith("flt-mol: error: ")
    assert words in error
    assert error.count("\n") == 1
    assert out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["pyproject.toml"]


def raising(error):
    def run(*arguments, **options):
        raise error

    return run


class Killed(SystemExit):
    pass


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("no"), 2, "flt-mol: error: no\n"),
        (
            OSError(28, "No space left", "x.csv"),
            2,
            "flt-mol: error: [Errno 28] No space left: 'x.csv'\n",
        ),
        (MemoryError(), 2, "flt-mol: error: not enough memory; try a smaller batch size\n"),
        (KeyboardInterrupt(), 130, "flt-mol: interrupted\n"),
        (SystemExit(128 + signal.SIGTERM), 143, "flt-mol: terminated\n"),
    ],
)
def test_statuses(error, status, text, monkeypatch, capsys):
    monkeypatch.setattr("flt_mol.evaluation.checkpoint.evaluation_folder", raising(error))
    error.add_note("weights are in runs/x")
    assert main(["evaluate", "emt-small"]) == status
    assert capsys.readouterr().err == f"{text}flt-mol: weights are in runs/x\n"


@pytest.mark.parametrize("error", [RuntimeError("bug"), TypeError("bug"), Killed(7)])
def test_errors_of_the_program_are_not_hidden(error, monkeypatch):
    monkeypatch.setattr("flt_mol.evaluation.checkpoint.evaluation_folder", raising(error))
    with pytest.raises(type(error)):
        main(["evaluate", "emt-small"])


def test_a_missing_package_is_named(monkeypatch, capsys):
    error = ModuleNotFoundError("No module named 'lightning'", name="lightning")
    monkeypatch.setattr("flt_mol.evaluation.checkpoint.evaluation_folder", raising(error))
    assert main(["evaluate", "emt-small"]) == 2
    assert "lightning is not installed" in capsys.readouterr().err


def test_warnings_are_one_line_and_come_once(monkeypatch, capsys):
    def run(*arguments):
        for text in ("a", "b", "a"):
            warnings.warn(text, UserWarning, stacklevel=1)
        for file in ("x", "y"):
            warnings.warn(f"{file}: no sid", NoteWarning, stacklevel=1)
            warnings.warn(f"{file}: skipped 1", UserWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        raise ValueError("end")

    monkeypatch.setattr("flt_mol.evaluation.checkpoint.evaluation_folder", run)
    main(["evaluate", "emt-small"])
    lines = capsys.readouterr().err.splitlines()
    shown = ("a", "b", "x: no sid", "x: skipped 1", "y: skipped 1")
    assert lines == [*(f"flt-mol: warning: {text}" for text in shown), "flt-mol: error: end"]


def test_text_that_terminals_must_not_be_sent_is_escaped(capsys):
    say("caf\u00e9\x1b[0m\ud800")
    assert capsys.readouterr().out == "café\\x1b[0m\\ud800\n"


def test_outputs_are_checked_before_the_work(tmp_path):
    (tmp_path / "file.csv").touch()
    (tmp_path / "folder.csv").mkdir()
    check_output(tmp_path / "file.csv", "-o", (".csv",))
    check_output(tmp_path / "new" / "folders" / "x.csv", "-o", (".csv",))
    check_output(tmp_path / "new", "-o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.csv", "folder.csv"]
    for path, suffixes in [
        ("file.csv", ()),
        ("folder.csv", (".csv",)),
        ("x.txt", (".csv",)),
        ("file.csv/x.csv", (".csv",)),
    ]:
        with pytest.raises(ValueError, match=f"cannot write .*{path}"):
            check_output(tmp_path / path, "-o", suffixes)
    with pytest.raises(ValueError, match="cannot write /proc"):
        check_output(type(tmp_path)("/proc/x.csv"), "-o", (".csv",))


def in_a_new_process(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_help_and_completion_do_not_wait_for_torch():
    code = "import sys, flt_mol.cli; flt_mol.cli.main(['--help']); print(*sys.modules)"
    assert not {"torch", "ase", "numpy", "scipy", "matplotlib"} & set(in_a_new_process(code))


@pytest.mark.slow
def test_the_shell_completes_commands():
    environment = {
        **os.environ,
        "_FLT_MOL_COMPLETE": "complete_bash",
        "COMP_WORDS": "flt-mol ",
        "COMP_CWORD": "1",
    }
    code = "import flt_mol.cli; flt_mol.cli.main([])"
    assert {"train", "predict", "data"} <= set(in_a_new_process(code, env=environment))


@pytest.mark.slow
def test_a_closed_pipe_is_silent():
    command = f"{sys.executable} -m flt_mol data inspect emt_adsorption --split val_id | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["data"], ["submission", "make"]])
def test_a_command_without_arguments_shows_its_help(arguments, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert main([*arguments, "--help"]) == 0
    assert shown.strip() == capsys.readouterr().out.strip()


def test_public_names_are_complete():
    assert set(flt_mol.__all__) <= set(dir(flt_mol))
    for name in flt_mol.__all__:
        assert getattr(flt_mol, name) is not None
    assert callable(flt_mol.predict)
    with pytest.raises(AttributeError, match="predictt"):
        _ = flt_mol.predictt


def test_submodules_do_not_shadow_public_names():
    code = (
        "import flt_mol.prediction.table, flt_mol.evaluation, flt_mol\n"
        "from flt_mol import predict\n"
        "print(type(predict).__name__, type(flt_mol.predict).__name__)"
    )
    assert in_a_new_process(code) == ["function", "function"]
