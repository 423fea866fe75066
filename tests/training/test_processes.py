"""Processes that train together, on this machine's CPU."""

import csv
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from socket import socket

import pytest
import torch
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from flt_mol.training.config import run_yaml
from flt_mol.training.folder import run_folder
from flt_mol.training.processes import World, gathered, meet, world_of
from helpers.kill_training import steps_done
from helpers.training import RANDOM, tiny_run

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BATCH = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
STEP = {**BATCH, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "3", "SLURM_PROCID": "2"}


@pytest.fixture(autouse=True)
def _nobody_started(monkeypatch):
    for name in (*TORCHRUN, *STEP, "FLT_MOL_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)


def setenv(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone(tmp_path, monkeypatch):
    """Variables of a batch script, or left behind, start nothing."""
    setenv(monkeypatch, {**BATCH, "SLURM_NTASKS_PER_NODE": "4", "LOCAL_RANK": "3", "RANK": "3"})
    assert world_of(1, 1) == World(1, 1, 0)
    assert world_of(4, 1) == World(4, 1, 0)
    assert gathered("a") == ["a"]
    with pytest.raises(ValueError, match=r"training\.nodes is 2"):
        world_of(1, 2)


def test_processes_follow_the_first(tmp_path, monkeypatch):
    settings, later = {"a": 1}, World(2, 1, 1)
    monkeypatch.setenv("NODE_RANK", "5")
    before = dict(os.environ)
    with run_folder(str(tmp_path / "run"), "run", settings, World(2)) as first:
        assert "NODE_RANK" not in os.environ  # left behind by something else
        os.environ["LOCAL_RANK"] = "1"
        assert world_of(2, 1) == later
        with run_folder(None, "run", settings, later) as followed:
            assert followed == first
    assert dict(os.environ) == before
    with (
        pytest.raises(ValueError, match="output=FOLDER"),
        run_folder(None, "run", settings, later),
    ):
        pass


def test_under_torchrun(monkeypatch):
    setenv(monkeypatch, dict(zip(TORCHRUN, ("5", "1", "6", "2", "host", "1234"), strict=True)))
    found = World(2, 3, 5, torchrun=True)
    assert world_of(1, 1) == world_of(2, 3) == found
    with pytest.raises(ValueError, match=r"training\.devices is 4.*torchrun"):
        world_of(4, 1)


def test_under_srun(monkeypatch):
    """Each task has its own run; several as one are torchrun's."""
    setenv(monkeypatch, STEP)
    assert world_of(1, 1) == World(1, 1, 0)
    with pytest.raises(ValueError, match=r"training\.devices is 4.*torchrun, or sbatch"):
        world_of(4, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "abc")
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS is 'abc'"):
        world_of(4, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_not_waited_for(monkeypatch, rank):
    setenv(monkeypatch, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    with pytest.raises(ValueError, match="not all of 2 processes"):
        meet(rank, 2, "start", 0.5)


def test_the_first_process_has_ended_before_the_second_has_come(monkeypatch):
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    setenv(monkeypatch, {"FLT_MOL_RUN_FOLDER": "run", **master})
    monkeypatch.setattr("flt_mol.training.processes.SOON", 0.3)
    with pytest.raises(ValueError, match="not all of 2 processes"):
        meet(1, 2, "fit", 1800.0)


def free_port():
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def command(config, folder, *overrides, module="flt_mol"):
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(run_yaml(config.model_copy(update={"output": None})))
    return [sys.executable, "-m", module, "train", str(file), f"output={folder}", *overrides]


def environment():
    return dict(os.environ)


def with_forces(path):
    """Those of EMT, in place of targets."""
    frames = read(path, ":")
    for atoms in frames:
        atoms.info = {"sid": atoms.info["sid"]}
        atoms.calc = EMT()
        results = {"energy": 0.1 * atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
    write(path, frames)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [["energy"], ["energy", "forces"]], ids=len)
def test_two_make_the_epochs_of_one(tmp_path, outputs):
    """Same global batches, of which the last has 4 systems for one process and 2 for the other.

    No dropout: each process draws its own. In float64, where two processes and one differ by 3e-14
    in the weights. In float32 they differ by 4e-5, and by 4e-5 relative in an MAE: sums over halves
    round otherwise, and AdamW divides by √v. Metrics are logged in float32.
    """
    model = {**RANDOM, "dropout": 0.0, "redraw_every": None, "outputs": outputs}
    model["pairs"] = {**model["pairs"], "vector_dropout": 0.0}
    config = tiny_run(tmp_path, 22, 5, model=model)
    if "forces" in outputs:
        for name in ("train", "val"):
            with_forces(tmp_path / f"{name}.extxyz")
    found = []
    for name, overrides in (
        ("one", ["training.batch_size=8"]),
        ("two", ["training.batch_size=4", "training.devices=2"]),
    ):
        done = subprocess.run(
            command(config, tmp_path / name, *overrides, module="helpers.wide_training"),
            env=environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "strides" not in done.stderr
        assert done.stdout.count("best epoch") == 1
        with (tmp_path / name / "logs/csv/metrics.csv").open() as file:
            rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        content = torch.load(tmp_path / name / "last.ckpt", weights_only=True)
        found.append((rows, content["state_dict"]))
    (first, weights), (second, others) = found
    assert len(first) == 2
    for a, b in zip(first, second, strict=True):
        assert b == pytest.approx(a, rel=1e-6)
    for name, value in weights.items():
        assert value.dtype == torch.float64 or not value.is_floating_point()
        torch.testing.assert_close(others[name], value, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_stops_all_after_the_same_step(tmp_path):
    """Whether the first process alone gets it, or all, as from a terminal or SLURM."""
    config, folder = tiny_run(tmp_path, 22, model=RANDOM, epochs=100_000), tmp_path / "two"

    def until(there, send, number):
        with subprocess.Popen(
            command(config, folder, "training.devices=2"),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            try:
                end = time.monotonic() + 120
                while not there() and time.monotonic() < end and process.poll() is None:
                    time.sleep(0.05)
                send(process.pid, number)
                out, err = process.communicate(timeout=60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], err
        assert "Traceback" not in err
        assert err.count("best.ckpt") == 1, err
        return out

    until((folder / "best.ckpt").exists, os.kill, signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        before = steps_done(folder / "resume.ckpt")
        out = until(lambda: steps_done(folder / "resume.ckpt") > before, os.killpg, number)  # noqa: B023
        assert f"resuming the run in {folder}" in out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_lost_process_ends_the_others(tmp_path, lost):
    config, folder = tiny_run(tmp_path, 22, model=RANDOM, epochs=100_000), tmp_path / "two"
    with (tmp_path / "err").open("w") as err:
        first = subprocess.Popen(command(config, folder, "training.devices=2"), stderr=err)
    second, end = 0, time.monotonic() + 120
    try:
        while not (folder / "resume.ckpt").exists() and time.monotonic() < end:
            time.sleep(0.1)
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        named = [x for x in children if b"train" in Path(f"/proc/{x}/cmdline").read_bytes()]
        second = int(named[-1])
        os.kill(first.pid if lost == "first" else second, signal.SIGKILL)
        status, state = first.wait(60), Path(f"/proc/{second}/stat")
        while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < end:
            time.sleep(0.1)
        assert not state.exists() or state.read_text().split()[2] == "Z"
    finally:
        for number in (first.pid, second) if second else (first.pid,):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    text = (tmp_path / "err").read_text()
    assert status == (2 if lost == "second" else -signal.SIGKILL), text
    assert text.count("another process of this run has ended") == 1
    assert "Traceback" not in text


@pytest.mark.slow
def test_processes_that_others_started(tmp_path):
    """They train as one run, with the same weights."""
    config, folder = tiny_run(tmp_path, 22, 5, model=RANDOM), tmp_path / "two"
    each = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    tasks = [
        subprocess.Popen(
            [*command(config, folder, "training.devices=2", module="helpers.dumped_training")],
            env={
                **environment(),
                **BATCH,
                **each,
                "LOCAL_RANK": rank,
                "RANK": rank,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for task in tasks:
        _, err = task.communicate(timeout=240)
        assert task.returncode == 0, err
    first, second = (torch.load(tmp_path / f"weights-{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with (folder / "logs/csv/metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_ends_the_wait_for_a_process_that_never_comes(tmp_path):
    config, folder = tiny_run(tmp_path), tmp_path / "two"
    there = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    there["MASTER_PORT"] = str(free_port())
    with subprocess.Popen(
        command(config, folder, "training.devices=2"),
        env={**environment(), **there},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end = time.monotonic() + 120
        while not folder.exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert not folder.exists()
