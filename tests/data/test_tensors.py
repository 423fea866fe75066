"""Any tensor as numbers, or a reason why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flt_mol.data import open_dataset
from flt_mol.data.tensors import numpy_of

READ = {
    "plain": lambda t: t,
    "bfloat16": lambda t: t.bfloat16(),
    "gradient": lambda t: t.clone().requires_grad_(),
    "sparse": lambda t: t.to_sparse(),
    "negative by a flag": lambda t: torch._neg_view(-t),
    "of a conjugate": lambda t: torch.complex(t, -t).conj().imag,
}
REFUSED = {
    "meta": lambda t: t.to("meta"),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.quint8),
}


@pytest.mark.parametrize("name", READ)
def test_numbers_of(name: str, make_record: Any) -> None:
    positions = torch.arange(18.0).reshape(6, 3)
    assert np.array_equal(numpy_of(READ[name](positions)), positions.numpy())
    record = make_record(pos=READ[name](positions), further=READ[name](positions[0]))
    (system,) = open_dataset(record)
    assert torch.equal(system.positions, positions)
    assert system.info["further"] == ([0.0, 1.0, 2.0],)


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning")
@pytest.mark.parametrize("field", ["pos", "y_relaxed", "cell", "tags", "further", "sid"])
@pytest.mark.parametrize("name", REFUSED)
def test_no_numbers(name: str, field: str, make_record: Any) -> None:
    bad = REFUSED[name](torch.ones(1))
    with pytest.raises(ValueError, match=rf"system 0.*{field} is a .*tensor"):
        list(open_dataset([make_record(**{field: bad})]))
