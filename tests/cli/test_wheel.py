"""The wheel carries data sets, models and configurations, and works away from the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of programs of an environment that holds the wheel, and not the checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the checkout to build a wheel from")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *build], check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    # Dependencies come from this environment; path files in it (an editable install) do not count.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, "--python", str(environment), *install], check=True, cwd=folder)
    return environment / "bin"


def run(installed, *command, cwd):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package_is_not_the_checkout(installed, tmp_path):
    where = run(installed, "python", "-c", "import flt_mol; print(flt_mol.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where


def test_data_and_weights_are_found(installed, tmp_path):
    text = run(
        installed, "flt-mol", "data", "inspect", "emt_adsorption", "--split", "val_id", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(text)["count"] > 100
    table = run(installed, "flt-mol", "evaluate", "emt_small", "--split", "val_id", cwd=tmp_path)
    assert "val_id" in table
    assert (tmp_path / "runs" / "emt_small-evaluation" / "results.json").is_file()


def test_configurations_are_found(installed, tmp_path):
    code = (
        "from flt_mol.training.config import load_run_config as load;"
        "print(load('emt_small').model.embed_dim, load('emt_performer_small').model.rpe)"
    )
    assert run(installed, "python", "-c", code, cwd=tmp_path).split() == ["64", "None"]
