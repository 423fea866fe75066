import numpy as np
import pytest
import torch

from flt_mol import Structures
from flt_mol.evaluation.systems import columns_of, joined_columns


def system(numbers, tags=None, **info):
    return Structures.single(numbers, torch.zeros(len(numbers), 3), tags=tags, info=info)


def test_columns_of_a_batch():
    batch = Structures.cat(
        [
            system([29, 29, 8, 1], [0, 1, 2, 2], facet="110"),
            system([]),
            system([78, 6, 1, 1, 8], [1, 2, 2, 2, 2], facet=(1, 1, 1)),
        ]
    )
    assert columns_of(batch) == {
        "natoms": (4, 0, 5),
        "adsorbate": ("HO", None, "CH2O"),
        "elements": ("Cu H O", None, "C H O Pt"),
        "facet": ("110", None, "111"),
    }


@pytest.mark.parametrize(
    ("stored", "text"),
    [((1, -1, 0), "1 -1 0"), (np.array([2, 1, 1]), "211"), (torch.tensor([1]), "1"), ("", None)],
)
def test_facets_as_data_sets_store_them(stored, text):
    assert columns_of(system([1], miller_index=stored))["facet"] == (text,)


def test_unknown_columns_are_left_out():
    parts = [columns_of(system([1], [2])), columns_of(system([29]))]
    assert joined_columns(parts) == {
        "natoms": (1, 1),
        "adsorbate": ("H", None),
        "elements": ("H", "Cu"),
    }
    assert joined_columns(parts[1:]) == {"natoms": (1,), "elements": ("Cu",)}
