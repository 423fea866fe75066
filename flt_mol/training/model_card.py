"""The model card that a folder of weights begins with: yaml front matter, then what people ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from flt_mol.models.energy import EnergyModel

_NAMES = {
    "val/mae": "MAE (eV)",
    "val/ewt": "energies within 0.02 eV (fraction)",
    "val/energy_initial_mae": "MAE of the energy before relaxation (eV)",
    "val/displacement": "mean distance of displacements (Å)",
}

_TEXT = """\
---
{front}---

# {name}

{what} Made with flt_mol {version}: {parameters:,} parameters; energies in eV, lengths in Å.

```python
from flt_mol import predict
from ase.io import read

print(predict(read("slab.traj", ":"), "{name}"))  # eV; the path of this folder
```

## Trained on

{data}

Elements seen: {elements}. For others energies are extrapolated, with a warning.

## Measured

{metrics}

## Limits, licence

*To be filled in: what the model should not be used for, and the licence of the weights.*
"""


def model_card(name: str, model: EnergyModel, settings: Mapping[str, Any]) -> str:
    """Text of a README.md for a model called `name`.

    Args:
        name: title, the folder's name.
        model: whose card it is.
        settings: as config.json has them: ``config``, ``metrics``, ``elements_seen``, versions.
    """
    front = {
        "library_name": "flt_mol",
        "tags": ["flt_mol", "chemistry", "materials", "catalysis", "adsorption-energy"],
    }
    data = settings["config"].get("data")
    source = data.get("name") if isinstance(data, Mapping) else None
    outputs = ", ".join(model.config.outputs).replace("_", " ")
    return _TEXT.format(
        front=yaml.safe_dump(front, sort_keys=False),
        name=name,
        what=f"A model of adsorption systems (outputs: {outputs}), from the initial structure.",
        version=settings["flt_mol_version"],
        parameters=sum(p.numel() for p in model.parameters()),
        data=f"`{source}`." if source else "*To be filled in: the data, and where to get them.*",
        elements=_symbols(settings["elements_seen"]) or "none noted",
        metrics=_table(settings["metrics"]),
    )


def _symbols(numbers: list[int]) -> str:
    from ase.data import chemical_symbols

    return ", ".join(chemical_symbols[z] for z in numbers)


def _table(metrics: Mapping[str, float]) -> str:
    rows = [f"| {_NAMES[key]} | {metrics[key]:.4f} |" for key in _NAMES if key in metrics]
    if not rows:
        return "*To be filled in: `flt-mol evaluate` measures it.*"
    head = ["On the validation split of training, by which the epoch was chosen:", "", "| | |"]
    return "\n".join([*head, "|---|---:|", *rows])
