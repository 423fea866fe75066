"""Put fingerprints of the training systems into checkpoints that lack them.

`flt-mol evaluate` then tells of these systems in whatever file they come, of runs tuned from such
a checkpoint, too. The training split is taken as the checkpoint's settings name it; all that
the file held stays as it is, weights bit for bit.

    python scripts/mark_trained_on.py models/*/weights.ckpt
"""

import argparse
from pathlib import Path

import torch

from flt_mol.data import open_dataset
from flt_mol.files import temporary_path
from flt_mol.training.config import DataConfig, known_keys
from flt_mol.training.run_data import split_path
from flt_mol.training.seen import systems_seen


def mark(path: Path) -> int:
    """Add `systems` to one checkpoint; give the number of its training systems.

    Raises:
        ValueError: it was tuned from another, or a part of its split was held out, or it says
            another number of systems than its split has.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    config = content["config"]
    if (config.get("finetune") or {}).get("checkpoint") or config["data"].get(
        "validation_fraction"
    ):
        raise ValueError(f"{path}: not all of its training systems are in one split alone")
    given = {k: v for k, v in config["data"].items() if f"data.{k}" in known_keys()}
    data = DataConfig(**given)
    dataset = open_dataset(split_path(data, data.train), energy=data.energy)
    systems = [dataset[i] for i in range(len(dataset))]
    stated = content["trained_on"]["systems"]
    if len(systems) != stated:
        raise ValueError(f"{path}: trained on {stated} systems, and {len(systems)} are there")
    content["systems"] = systems_seen(systems, None)
    with temporary_path(path, durable=True) as temporary:
        torch.save(content, temporary)
    return len(systems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    for checkpoint in parser.parse_args().checkpoints:
        print(f"{checkpoint}: {mark(checkpoint):,} systems")
