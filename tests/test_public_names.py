"""What `import flt_mol` gives, and what it must not wait for."""

import importlib
import pickle
import subprocess
import sys

import pytest

import flt_mol

HEAVY = {"ase", "lmdb", "scipy", "yaml", "rich", "vesin", "lightning", "hydra", "matplotlib"}


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_else():
    code = "import sys, flt_mol; before = dir(flt_mol)\nprint(*sorted(sys.modules))"
    loaded = {name.partition(".")[0] for name in in_a_new_process(code).split()}
    assert "torch" in loaded
    assert not loaded & HEAVY


WAYS = [
    "import flt_mol; f = flt_mol.predict",
    "import flt_mol.predict; f = flt_mol.predict",
    "import flt_mol.predict as f",
    "from flt_mol import predict as f",
    "from flt_mol.predict import predict_files, predict as f",
    "from flt_mol.predict import *; f = predict; FLTCalculator, load_model, Prediction",
    "import flt_mol.prediction.files, flt_mol; f = flt_mol.predict",
    "import importlib; f = importlib.import_module('flt_mol.predict').predict",
]
EACH_FROM_THE_START = """
import os, sys, torch
for way in {ways}:
    child = os.fork()
    if not child:
        names = {{}}
        exec(way, names)
        print(way, "->", names["f"].__module__, names["f"].__qualname__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_predict_is_the_function_in_whichever_way_it_is_imported():
    told = in_a_new_process(EACH_FROM_THE_START.format(ways=WAYS)).splitlines()
    assert told == [f"{way} -> flt_mol.predict predict" for way in WAYS]


def test_functions_can_be_pickled():
    module = importlib.import_module("flt_mol.predict")
    for function in (flt_mol.predict, module.predict_files, module.FLTCalculator):
        assert pickle.loads(pickle.dumps(function)) is function


def test_all_promised_names_are_there():
    module = importlib.import_module("flt_mol.predict")
    for place in (flt_mol, module):
        assert all(getattr(place, name) is not None for name in place.__all__)
    assert set(module.__all__) <= set(dir(module))
    for place in (flt_mol, module):
        with pytest.raises(AttributeError, match="no attribute 'predictt'"):
            _ = place.predictt
