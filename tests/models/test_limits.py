"""Systems that are too large for spectral filters: told before, by sid, and left out on request."""

import math
import pickle
import warnings
from dataclasses import replace
from functools import partial

import ase.io
import pytest
import torch
from conftest import KINDS, SPECTRAL, small_model

from flt_mol.cli import main
from flt_mol.data import open_dataset, to_ase
from flt_mol.data.loader import target_statistics
from flt_mol.models import EnergyConfig
from flt_mol.models.build import check_systems
from flt_mol.prediction.energies import predict_structures
from flt_mol.prediction.table import StructureFiles, predict_files
from flt_mol.prediction.members import load_members
from flt_mol.structures import Structures
from flt_mol.models.checkpoint import save_checkpoint
from flt_mol.training.config import RunConfig

CONFIG = EnergyConfig(rpe=None, spectral=SPECTRAL)
TOO_LARGE = r"sid giant: too large for this model: .*, 400 x 400 x 400 Å, .*\(--skip-bad, or data"


def system(length, sid):
    """Atoms along the diagonal of a cube, which leaves no vacuum, 5 Å apart along each edge."""
    steps = torch.arange(0, length, 5.0)[:, None].expand(-1, 3)
    return Structures.single(
        [29] * len(steps),
        steps,
        cell=length * torch.eye(3),
        pbc=True,
        tags=[1] * len(steps),
        sid=sid,
        energy=float(len(steps)),
    )


GIANT = system(400.0, "giant")
SMALL = [system(10.0 + i, f"small {i}") for i in range(4)]


@pytest.fixture(scope="module")
def model():
    model = small_model(**KINDS["spectral"]).eval()
    model.mark_seen(range(1, 119))
    return model


@pytest.fixture
def frames(tmp_path):
    """A file of ASE's: four usual systems, and a giant in the middle."""
    path = tmp_path / "frames.extxyz"
    frames = [to_ase(s) for s in (*SMALL[:2], GIANT, *SMALL[2:])]
    for frame, s in zip(frames, (*SMALL[:2], GIANT, *SMALL[2:]), strict=True):
        frame.info |= {"sid": s.sid[0], "y_relaxed": float(s.energy)}
    ase.io.write(path, frames)
    return path


@pytest.fixture
def file(frames):
    """The same systems in a file that is read as it is asked for."""
    path = frames.with_suffix(".lmdb")
    assert main(["data", "convert", str(frames), str(path)]) == 0
    return path


def test_the_giant_is_named_before_and_by_the_model(model):
    batch = Structures.cat([*SMALL, GIANT])
    for refuse in (partial(check_systems, model.config), model, load_members(model).check):
        with pytest.raises(ValueError, match=TOO_LARGE):
            refuse(batch)
        refuse(Structures.cat(SMALL))
    check_systems(EnergyConfig(), batch)


def test_a_budget_of_waves_takes_the_giant():
    part = replace(SPECTRAL, max_vectors=30)
    model = small_model(**{**KINDS["spectral"], "spectral": part}).eval()
    check_systems(model.config, GIANT)
    assert model(GIANT)["energy"].isfinite().all()
    with pytest.raises(ValueError, match=r"model\.spectral\.max_vectors looks at fewer"):
        check_systems(CONFIG, GIANT)


def test_far_apart_fragments_are_computed(model):
    places = [[0, 0, 0.0], [700, 1, 30], [30, 900, 0], [10, 20, 800]]
    far = Structures.single([29] * 4, places, tags=[1] * 4)
    atom = Structures.single([29], [[0, 0, 0.0]], tags=[1])
    assert len(far) == 1
    energies = [float(model(s)["energy"].detach()) for s in (far, atom)]
    mean = float(model.normalizer.mean)
    assert energies[0] - mean == pytest.approx(4 * (energies[1] - mean), abs=1e-5)


@pytest.mark.parametrize("kind", ["spectral", "pairs", "both filters"])
def test_positions_that_are_not_finite_name_their_system(kind):
    bad = replace(SMALL[1], positions=SMALL[1].positions * math.nan)
    with pytest.raises(ValueError, match="sid small 1: .*(not finite|expected finite)"):
        small_model(**KINDS[kind])(Structures.cat([SMALL[0], bad, SMALL[2]]))


def test_a_data_set_checks_what_it_reads(file):
    check = partial(check_systems, CONFIG)
    dataset = pickle.loads(pickle.dumps(open_dataset(file, check=check)))
    assert dataset[1].sid == ("small 1",)
    named = rf"frames.lmdb, record 2, {TOO_LARGE}"
    for read in (lambda: dataset[2], lambda: dataset.batch([0, 2]), dataset.read_through):
        with pytest.raises(ValueError, match=named):
            read()
    skipping = open_dataset(file, on_error="skip", check=check)
    assert [s.sid[0] for s in skipping] == [f"small {i}" for i in range(4)]
    assert len(skipping.skipped) == 1
    assert "sid giant" in skipping.skipped[0]
    skipping.read_through()
    assert len(open_dataset([*SMALL, GIANT], on_error="skip", check=check)) == 4


def test_files_of_ases_and_rows_are_checked(frames):
    check = partial(check_systems, CONFIG)
    rows = frames.with_suffix(".aselmdb")
    assert main(["data", "convert", str(frames), str(rows)]) == 0
    for path in (frames, rows):
        with pytest.raises(ValueError, match=TOO_LARGE):
            open_dataset(path, check=check).batch(range(5))
        assert len(open_dataset(path, on_error="skip", check=check)) == 4


def test_predict_refuses_before_it_begins_or_leaves_out(model, file):
    calls = []
    for read in (
        lambda: predict_files(model, file, 1, progress=lambda *done: calls.append(done)),
        lambda: predict_structures(model, [*SMALL, GIANT]),
    ):
        with pytest.raises(ValueError, match=TOO_LARGE):
            read()
    assert not calls
    with pytest.warns(UserWarning, match=r"(?s)left out 1 of 5 records:\n.*sid giant"):
        found = predict_files(model, file, skip_bad=True)
    assert [p.name for p in found] == [f"small {i}" for i in range(4)]
    expected = predict_structures(model, SMALL)
    assert [p.energy for p in found] == pytest.approx(list(expected), abs=1e-5)
    blind = small_model(**KINDS["performer"])
    for members in ([model, blind], [blind, model]):
        files = StructureFiles(file, check=load_members(members).check)
        with pytest.raises(ValueError, match=TOO_LARGE):
            files.read_through()
    StructureFiles(file, check=load_members(blind).check).read_through()


def test_the_commands(model, file, tmp_path, capsys):
    checkpoint = str(tmp_path / "model.ckpt")
    save_checkpoint(checkpoint, model, config={"data": {}}, metrics={})
    out = ["--output", str(tmp_path / "e")]
    predict = ["predict", checkpoint, str(file), "-o", str(tmp_path / "p.csv")]
    for arguments in (predict, ["evaluate", checkpoint, "--data", str(file), *out]):
        assert main(arguments) == 2
        assert "sid giant: too large" in capsys.readouterr().err
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main([*arguments, "--skip-bad"]) == 0
    assert "left out 1 of 5 records" in capsys.readouterr().err
    assert (tmp_path / "p.csv").read_text().count("small") == 4
