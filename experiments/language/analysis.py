"""Where trained attention looks, its matrices as a figure, and generation token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from common.figures import new_figure, save
from common.results import markdown_table
from flt_mol.nn import FLTAttention
from language.model import LanguageModel


@torch.no_grad()
def attention_matrices(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    """The weights in use in each layer, (B, H, L, L)."""
    found = []
    hooks = [
        block.attention.register_forward_pre_hook(
            lambda layer, rows, given: found.append(
                torch.stack(layer.matrices(*rows, ptr=given["ptr"]))
            ),
            with_kwargs=True,
        )
        for block in model.encoder.blocks
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def shares(weights: Tensor) -> tuple[float, float]:
    """Mean attention to the nearest and to the farthest tenth of what each token sees.

    Tokens with fewer than ten tokens in sight, themselves included, are skipped; a tenth is
    rounded up. Causal weights (…, L, L).

    Examples:
        >>> even = torch.ones(20, 20).tril()
        >>> near, far = shares(even / even.sum(-1, keepdim=True))
        >>> round(near, 3), round(far, 3)
        (0.131, 0.131)
    """
    total = weights.cumsum(-1)
    row = torch.arange(9, weights.shape[-1])
    tenth = (row + 10) // 10  # ⌈(row + 1)/10⌉
    near = total[..., row, row] - total[..., row, row - tenth]
    return near.mean().item(), total[..., row, tenth - 1].mean().item()


def attention_shares(model: LanguageModel, tokens: Tensor) -> dict[str, float]:
    """`shares` over all layers and heads, for the library's attention; else nothing."""
    if not isinstance(model.encoder.blocks[0].attention, FLTAttention):
        return {}
    near, far = shares(torch.stack(attention_matrices(model, tokens)))
    return {"nearest": round(near, 4), "farthest": round(far, 4)}


def draw(matrices: list[Tensor], path: Path) -> Path:
    """All heads' matrices (H, L, L) of each layer; colours are weights times tokens in sight."""
    figure = new_figure(1.9 * len(matrices[0]), 2.05 * len(matrices))
    axes = figure.subplots(len(matrices), len(matrices[0]), squeeze=False)
    length = matrices[0].shape[-1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    in_sight = torch.arange(1, length + 1)[:, None]
    for layer, (row, heads) in enumerate(zip(axes, matrices, strict=True)):
        for head, (axis, weights) in enumerate(zip(row, heads, strict=True)):
            shown = (weights * in_sight).masked_fill(later, torch.nan)
            image = axis.imshow(shown.numpy(), vmin=0, vmax=4, cmap="viridis")
            axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
    axes[-1, 0].set_xlabel("key", fontsize=8)
    axes[-1, 0].set_ylabel("query", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, extend="max")
    bar.set_label("attention / uniform attention", fontsize=8)
    return save(figure, path, colours=64)


def generation(model: LanguageModel, tokens: Tensor, count: int) -> str:
    """Steps against the full forward: largest difference, and ms per token by length."""
    chosen, seen = model.generate(tokens, count)
    whole = torch.cat([tokens, chosen], 1)
    with torch.no_grad():
        full = model(whole[:, :-1])[:, -count:]
    same = bool((full.argmax(-1) == chosen).all())
    text = (
        f"{count} tokens generated: {'the same' if same else 'NOT the same'} as by the whole "
        f"forward, logits differ by {(full - seen).abs().max().item():.1e} at most "
        f"(largest {full.abs().max().item():.1f}).\n\n"
    )
    rows = []
    for length in (tokens.shape[1] // 4, tokens.shape[1], 4 * tokens.shape[1]):
        before = tokens[:, torch.arange(length) % tokens.shape[1]]
        embedded = model.embedded(before)
        with torch.no_grad():
            state = model.encoder.state_after(embedded)
            step = _ms(lambda s=state, e=embedded: model.logits(model.encoder.step(e[:, -1], s)[0]))
            forward = _ms(lambda b=before: model(b))
        numbers = sum(part.sums.numel() for part in state)
        rows.append([length, f"{step:.2f}", numbers, f"{forward:.2f}"])
    head = ["tokens before", "ms, one step", "numbers in the state", "ms, whole forward"]
    return text + markdown_table(head, rows)


def _ms(call: Callable[[], object], times: int = 5) -> float:
    call()
    seconds = []
    for _ in range(times):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return 1e3 * median(seconds)
