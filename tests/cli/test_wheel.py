"""The wheel carries data sets, models and configurations, and works away from the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
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
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
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
    table = run(installed, "flt-mol", "evaluate", "emt-small", "--split", "val_id", cwd=tmp_path)
    assert "val_id" in table
    assert (tmp_path / "runs" / "emt-small-evaluation" / "results.json").is_file()


def test_the_wheel_holds_the_data_of_the_checkout_and_nothing_else(installed):
    share = installed.parent / "share" / "flt_mol"
    for kind in ("configs", "datasets", "models"):
        found = {str(x.relative_to(share)) for x in (share / kind).rglob("*") if x.is_file()}
        listed = subprocess.run(
            ["git", "ls-files", kind], cwd=ROOT, capture_output=True, text=True, check=True
        )
        wanted = {name for name in listed.stdout.split() if not name.endswith("make.py")}
        assert found == wanted
    (site,) = installed.parent.glob("lib/python*/site-packages")
    assert (site / "flt_mol" / "evaluation" / "report.html.jinja").is_file()
    assert (site / "flt_mol" / "py.typed").is_file()
    names = {path.name for path in site.iterdir()}
    assert not names & {"tests", "datasets", "models", "configs", "experiments", "docs"}


def test_predict_and_quickstart_in_an_empty_folder(installed, tmp_path):
    path = run(
        installed, "python", "-c",
        "from flt_mol.files import shipped_folder; print(shipped_folder('datasets'))",
        cwd=tmp_path,
    ).strip()  # fmt: skip
    records = f"{path}/emt_adsorption/val_id.lmdb"
    text = run(installed, "flt-mol", "predict", "flt-small", records, "-o", "p.csv", cwd=tmp_path)
    assert text.startswith("411 structures")
    text = run(
        installed, "flt-mol", "train", "quickstart", "training.epochs=1", "output=run", cwd=tmp_path
    )
    assert "run/best.ckpt" in text
