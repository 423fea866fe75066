"""Systems of a batch: packed rows, their offsets ``ptr`` (B + 1,), sums per system.

Row n is of system b if ``ptr[b] <= n < ptr[b + 1]``. Systems may be empty. Rows beyond ``ptr[B]``,
which compiled and exported graphs have, are padding: they belong to no system and get zeros.

What is done system by system is done in **groups**: systems of similar size, padded to the longest,
as many as `group_budget` allows. The number of operations depends on groups only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import custom_op

_F = TypeVar("_F", bound=Callable[..., object])
_OUTSIDE: dict[Callable[..., object], Any] = {}
_BUDGETS = {"cpu": 2**17}  # about a core's cache
_BUDGET_ELSEWHERE = 2**30
LOWEST = {dtype: torch.finfo(dtype).min / 4 for dtype in (torch.float32, torch.float64)}
"""Stands for log 0 where −∞ − (−∞) would be NaN; differences of two such are finite."""

_budget: ContextVar[int | None] = ContextVar("flt_mol_group_budget", default=None)


@contextmanager
def group_budget(numbers: int) -> Iterator[None]:
    """In this context the largest tensor of a group of systems has at most so many numbers.

    Chunks of pairs hold as many. A group has one system at least. The default fits a CPU core's
    cache, and is 2³⁰ elsewhere. Results depend on it by rounding only.

    Examples:
        >>> with group_budget(2**40):  # a batch is one group
        ...     budget_of(torch.device("cpu")) == 2**40
        True
    """
    token = _budget.set(numbers)
    try:
        yield
    finally:
        _budget.reset(token)


def budget_of(device: torch.device) -> int:
    """How many numbers the largest tensor of a group may have on a device."""
    chosen = _budget.get()
    return _BUDGETS.get(device.type, _BUDGET_ELSEWHERE) if chosen is None else chosen


class PaddedRows(NamedTuple):
    """The rows of G systems as a block (G, L), L being the largest number of rows.

    Attributes:
        number: G.
        length: L.
        start: first row of the block where its rows are consecutive and all real.
        slots: (G·L,) int64, the row in each slot, else None; slots beyond a system repeat its last.
        by_row: (H·G·L,) int64, the same by head, of rows (N, H) in one.
        real: (G, L) bool, which slots are no such repetitions; None where all are real.
    """

    number: int
    length: int
    start: int = 0
    slots: Tensor | None = None
    by_row: Tensor | None = None
    real: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """(N, …) → (G, L, …), a view where rows are consecutive."""
        if self.slots is None:
            x = x[self.start : self.start + self.number * self.length]
        else:
            x = x.index_select(0, self.slots)
        return x.reshape(self.number, self.length, *x.shape[1:])

    def by_head(self, x: Tensor) -> Tensor:
        """(H, N, F) → (H·G, L, F), a view where rows are those of one system."""
        if self.slots is None:
            x = x[:, self.start : self.start + self.number * self.length]
            if self.number == 1:
                return x
        elif self.by_row is not None and x.transpose(0, 1).is_contiguous():
            # Laid out by row: read so.
            x = x.transpose(0, 1).flatten(0, 1).index_select(0, self.by_row)
        else:
            x = x.index_select(1, self.slots)
        return x.reshape(-1, self.length, x.shape[-1])


class Groups(NamedTuple):
    """Systems of a batch in groups of similar size; those that cost nothing are in none.

    Attributes:
        systems: which systems each group has.
        rows: the rows of each group.
        keys: those of other offsets, such as keys or reciprocal vectors; `rows` where none are.
        place: (N,) int64, the slot of every row among those of all groups, one after the other, for
            rows without a group that behind all others. None where slots are the rows, in order.
        complete: whether all rows have a group.
    """

    systems: tuple[tuple[int, ...], ...]
    rows: tuple[PaddedRows, ...]
    keys: tuple[PaddedRows, ...]
    place: Tensor | None
    complete: bool

    def put_back(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Slots of all groups, G·L of each along `dim`, to rows; zeros for rows without a group."""
        if not self.complete:
            shape = list(parts[0].shape)
            shape[dim] = 1
            parts = [*parts, parts[0].new_zeros(shape)]
        slots = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
        return slots if self.place is None else slots.index_select(dim, self.place)


@lru_cache(maxsize=16)
def groups_of(
    costs: tuple[int, ...],
    offsets: tuple[int, ...],
    key_offsets: tuple[int, ...],
    num_rows: int,
    device: torch.device,
    budget: int,
    heads: int = 1,
) -> Groups:
    """The groups of B systems, of count × largest cost ≤ `budget` each, or of one system.

    Args:
        costs: of each system, the numbers of its largest tensor, per slot; 0 leaves it out, as
            systems without rows or keys have to be.
        offsets: `ptr` as B + 1 numbers.
        key_offsets: the same of keys; `offsets` where there are no others.
        num_rows: N.
        device: of the rows.
        budget: from `budget_of`.
        heads: H of what is read by head.
    """
    groups: list[list[int]] = []
    for system in sorted((b for b, cost in enumerate(costs) if cost), key=costs.__getitem__):
        if groups and (len(groups[-1]) + 1) * costs[system] <= budget:
            groups[-1].append(system)
        else:
            groups.append([system])
    for group in groups:
        group.sort()  # consecutive rows need no index
    with torch.inference_mode(False):  # kept for later calls, with gradients too
        rows = keys = tuple(_block(offsets, group, device, heads) for group in groups)
        if key_offsets != offsets:
            keys = tuple(_block(key_offsets, group, device, heads) for group in groups)
        slots = [0, *accumulate(block.number * block.length for block in rows)]
        first, step = [slots[-1]] * (len(costs) + 1), [0] * (len(costs) + 1)
        for group, block, slot in zip(groups, rows, slots, strict=False):
            for number, system in enumerate(group):
                first[system], step[system] = slot + number * block.length, 1
        ends = [*offsets, num_rows]
        sizes = torch.tensor([b - a for a, b in pairwise(ends)], device="cpu")
        table = torch.tensor([first, offsets, step], device="cpu")
        table = table.repeat_interleave(sizes, 1, output_size=num_rows)
        steps = torch.arange(num_rows, device="cpu")
        place = table[0] + (steps - table[1]) * table[2]
        complete = bool(table[2].numpy().all())
        same = slots[-1] == num_rows and complete and torch.equal(place, steps)
        moved = None if same else place.to(device)
    return Groups(tuple(map(tuple, groups)), rows, keys, moved, complete)


def _block(
    offsets: Sequence[int], systems: Sequence[int], device: torch.device, heads: int
) -> PaddedRows:
    starts = [offsets[b] for b in systems]
    sizes = [offsets[b + 1] - offsets[b] for b in systems]
    count, length = len(starts), max(sizes)
    even = min(sizes) == length
    if even and starts[-1] - starts[0] == (count - 1) * length:
        return PaddedRows(count, length, starts[0])
    first, size = torch.tensor([starts, sizes], device="cpu")[..., None]
    step = torch.arange(length, device="cpu")
    index = (first + step.minimum(size - 1)).flatten()
    by_row = (index * heads + torch.arange(heads, device="cpu")[:, None]).flatten().to(device)
    real = None if even else (step < size).to(device)
    return PaddedRows(count, length, 0, index.to(device), by_row, real)


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def settled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What operators are given: all in the widest of their dtypes, at least float32.

    Raises:
        NotImplementedError: in forward-mode differentiation, where torch would take the derivative
            of a custom operator for 0.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise NotImplementedError(
            "flt_mol's operators have no forward-mode derivatives: use reverse mode, "
            "torch.autograd.grad or torch.autograd.functional.jvp"
        )
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products of `x` keep their own dtype, under autocast too."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def outside(function: _F) -> _F:
    """`function` as `torch.compiler.disable` makes it, which graphs call without looking inside.

    Not as a decorator: that would import the compiler, seconds, with the module. ``fullgraph=True``
    needs it made before the graph: a graph cannot make it.
    """
    if function not in _OUTSIDE:
        _OUTSIDE[function] = torch.compiler.disable(function)
    found: _F = _OUTSIDE[function]
    return found


def check_ptr(
    ptr: Tensor, num_rows: int, key_ptr: Tensor | None = None, num_keys: int | None = None
) -> Tensor:
    """The offsets of keys, `ptr` itself where none are given, after a look at both.

    `ptr` (B + 1,) is to describe all N queries, `key_ptr` all K keys, K = N unless given. Nothing
    is checked in graphs, which it would break.

    Raises:
        ValueError: offsets that do not describe these rows, or two that are not of the same B.
    """
    keys = ptr if key_ptr is None else key_ptr
    if torch.compiler.is_compiling():
        return keys
    num_keys = num_rows if num_keys is None else num_keys
    if key_ptr is None and num_keys != num_rows:
        raise ValueError(f"there are {num_keys} keys for {num_rows} queries: give key_ptr too")
    if keys.numel() != ptr.numel():
        raise ValueError(
            f"ptr describes {ptr.numel() - 1} systems, key_ptr {keys.numel() - 1}: both need the "
            "same systems in the same order, empty ones included"
        )
    row_offsets(ptr, num_rows, padding=False)
    if key_ptr is not None:
        row_offsets(key_ptr, num_keys, "key_ptr", padding=False)
    return keys


def row_offsets(
    ptr: Tensor, num_rows: int, name: str = "ptr", *, padding: bool = True
) -> tuple[int, ...]:
    """`ptr` as B + 1 numbers; `name` is what errors call it. Not for compiled code.

    Those of a tensor on another device are read once, and kept with it until it is changed.

    Raises:
        ValueError: offsets that do not describe the rows, to the last one unless `padding`.
    """
    if ptr.dim() != 1 or ptr.numel() == 0 or ptr.dtype not in (torch.int64, torch.int32):
        found = f"shape {tuple(ptr.shape)} and {ptr.dtype}"
        raise ValueError(f"{name} must hold B + 1 integers, int64 or int32, got {found}")
    version, offsets = getattr(ptr, "_flt_mol_offsets", (None, (0,)))
    if version is None or version != ptr._version:
        offsets = tuple(map(int, ptr.tolist()))
        if not (ptr.is_cpu or ptr.is_inference()):
            ptr._flt_mol_offsets = ptr._version, offsets  # type: ignore[attr-defined]
    beyond = num_rows - offsets[-1]
    if offsets[0] != 0 or beyond < 0 or (beyond and not padding) or sorted(offsets) != [*offsets]:
        raise ValueError(
            f"{name} must start at 0, never decrease and end at the number of rows, {num_rows}; "
            f"found {str(offsets)[:60]}; PyG's batch is system=batch, or offsets_of(batch)"
        )
    return offsets


def system_index(ptr: Tensor, num_rows: int) -> Tensor:
    """(N,) int64, the system of each row, ascending; B for rows beyond the last offset.

    Examples:
        >>> system_index(torch.tensor([0, 2, 2, 5]), 6)
        tensor([0, 0, 2, 2, 2, 3])
    """
    rows = torch.arange(num_rows, device=ptr.device)
    return torch.searchsorted(ptr[1:].to(torch.int64), rows, right=True)


def index_in_system(ptr: Tensor, num_rows: int) -> Tensor:
    """(N,) int64, how many rows of its own system come before each row; 0 for padding rows."""
    rows = torch.arange(num_rows, device=ptr.device)
    system = system_index(ptr, num_rows)
    first = torch.cat([ptr[:-1], ptr.new_full((1,), num_rows)]).to(torch.int64)
    return (rows - first[system]).clamp(min=0)


def offsets_of(system: Tensor, num_systems: int | None = None) -> tuple[Tensor, Tensor | None]:
    """`ptr` of a vector of system indices, and the order that sorts its rows.

    In graphs nothing is checked, order is always given, and without `num_systems` each system that
    has rows takes the next free number: B = N then, with empty systems at the end.

    Args:
        system: (N,) integers ≥ 0, the system of each row, in any order.
        num_systems: B; the default is the largest index + 1, which misses empty systems at the end.

    Returns:
        ptr (B + 1,) int64, and order (N,) int64 such that ``x[order]`` is packed with every
        system's rows in their old order, or None where `system` is sorted already.

    Raises:
        ValueError: indices that are negative or ≥ `num_systems`.

    Examples:
        >>> ptr, order = offsets_of(torch.tensor([1, 0, 1]), num_systems=3)
        >>> ptr.tolist(), order.tolist()
        ([0, 1, 3, 3], [1, 0, 2])
    """
    if system.dim() != 1 or system.is_floating_point() or system.dtype == torch.bool:
        raise ValueError(
            f"system must hold one integer per row, got shape {tuple(system.shape)} "
            f"and {system.dtype}"
        )
    system = system.to(torch.int64)  # differences of unsigned integers wrap around
    if torch.compiler.is_compiling():
        order = torch.argsort(system, stable=True)
        ascending = system[order]
        if num_systems is None:
            # No slice of N − 1 rows: torch.export would make a rule of N ≥ 3 out of it.
            first = torch.searchsorted(ascending, ascending)
            num_systems = system.shape[0]
            ascending = (first == torch.arange(num_systems, device=system.device)).cumsum(0) - 1
        boundaries = torch.arange(num_systems + 1, device=system.device)
        return torch.searchsorted(ascending, boundaries), order
    low, high = (int(x) for x in system.aminmax()) if system.numel() else (0, -1)
    if low < 0 or (num_systems is not None and high >= num_systems):
        raise ValueError(
            f"system holds indices from {low} to {high}, expected 0 to "
            f"{'B - 1' if num_systems is None else num_systems - 1}"
        )
    sizes = torch.bincount(system, minlength=num_systems or 0)
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return ptr, None if bool((system.diff() >= 0).all()) else torch.argsort(system, stable=True)


def sum_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """Σ of the rows of each system: (N, …) → (B, …); zeros for systems without rows."""
    total = x.new_zeros(ptr.shape[0], *x.shape[1:])  # padding goes to a system of its own
    return total.index_add(0, system_index(ptr, x.shape[0]), x)[:-1]


def mean_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """Mean of the rows of each system: (N, …) → (B, …); zeros for systems without rows."""
    sizes = ptr.diff().clamp(min=1).reshape(-1, *[1] * (x.dim() - 1))
    return sum_per_system(x, ptr) / sizes


def first_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """The first row of each system: (N, …) → (B, …); zeros for systems without rows."""
    # A row of zeros at the end, so that there is one to point at when N = 0.
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded[torch.where(ptr.diff() > 0, ptr[:-1], x.shape[0]).to(torch.int64)]


def largest_per_system(x: Tensor, ptr: Tensor) -> Tensor:
    """Largest of the rows of each system, detached: (N, …) → (B + 1, …), padding rows the last.

    At least `LOWEST`, which systems without rows have, so that it can be taken off −∞.
    """
    x = x.detach()
    system = system_index(ptr, x.shape[0]).view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    floor = x.new_full((ptr.shape[0], *x.shape[1:]), LOWEST[x.dtype])
    return floor.scatter_reduce(0, system, x, "amax")


def spread(per_system: Tensor, ptr: Tensor, num_rows: int) -> Tensor:
    """Each row's own entry of a tensor per system: (B, …) → (N, …); zeros for padding rows."""
    padded = torch.cat([per_system, per_system.new_zeros(1, *per_system.shape[1:])])
    return padded[system_index(ptr, num_rows)]


def centred(positions: Tensor, ptr: Tensor) -> Tensor:
    """Positions relative to the mean of their own system: (N, ℓ) → (N, ℓ), at least float32.

    The first row of each system is taken off before the mean is formed, so coordinates of
    10⁵ Å lose no more than their own float32 spacing. Padding rows are 0.

    Examples:
        >>> centred(torch.tensor([[100001.0], [100002.0], [5.0]]), torch.tensor([0, 2, 3])).tolist()
        [[-0.5], [0.5], [0.0]]
    """
    positions = at_least_float32(positions)
    system = system_index(ptr, positions.shape[0])  # of padding B, whose first row is ptr[B]
    # The mean makes the result independent of the anchor, so the anchor needs no gradient.
    local = positions - positions.detach().index_select(0, ptr.index_select(0, system))
    local = local.masked_fill((system == ptr.shape[0] - 1)[:, None], 0.0)
    total = positions.new_zeros(ptr.shape[0], positions.shape[1]).index_add(0, system, local)
    sizes = ptr.diff(append=ptr.new_full((1,), positions.shape[0]))
    return local - (total / sizes[:, None]).index_select(0, system)


# Attention over groups is one step for autograd and for compilers: graphs cannot loop over groups.
# Beyond the budget inputs are all that is kept: the backward pass computes features or weights
# again, in the cache.

Run = Callable[..., tuple[Tensor, ...]]
Cost = Callable[[int, int, int], int]
_Kept = tuple[Tensor, tuple[Any, ...]]


def single_step(
    name: str,
    schema: tuple[str, str],
    forward: Callable[..., Tensor | _Kept],
    shape: Callable[..., tuple[int, ...]],
    backward: Callable[..., Sequence[Tensor]] | None = None,
) -> Callable[..., Tensor]:
    """`forward` as one step for autograd: in eager mode, and as ``torch.ops.flt_mol.NAME``.

    Args:
        name: of the operator; that of its gradients has `_gradients` at the end.
        schema: names of the tensors it can be differentiated by, ``"Tensor q, Tensor k"``, and what
            else it takes.
        forward: (*tensors, *others) → result; or a pair of it and of what `backward` gets besides,
            last, where gradients need no gradients.
        shape: (*tensors, *others) → shape of the result.
        backward: (gradient, *tensors, *others) → gradients to the tensors; both of differentiable
            steps, for derivatives of higher order. None: by autograd of `forward`, run again.
    """
    count = schema[0].count("Tensor ")
    arguments = ", ".join(schema)

    def result(*given: Any) -> Tensor:
        out = forward(*given)
        return out[0] if isinstance(out, tuple) else out

    if backward is None:

        def backward(grad: Tensor, *given: Any) -> Sequence[Tensor]:
            return gradients_of(result, grad, given[:count], *given[count:])

    def run(*given: Any) -> Tensor:
        with torch.no_grad():
            return result(*given).contiguous()

    def run_backward(*given: Any) -> tuple[Tensor, ...]:
        # Operators run below autograd, which some gradients are made by.
        include = torch._C._dispatch_tls_local_include_set()
        nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        with torch._C._ForceDispatchKeyGuard(include, nothing), torch.no_grad():
            return tuple(x.contiguous() for x in backward(*given))

    compiled = custom_op(
        f"flt_mol::{name}", run, mutates_args=(), schema=f"({arguments}) -> Tensor"
    )
    gradients = custom_op(
        f"flt_mol::{name}_gradients",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor grad, {arguments}) -> ({', '.join(['Tensor'] * count)})",
    )
    compiled.register_fake(lambda *given: given[0].new_empty(shape(*given)))
    gradients.register_fake(lambda grad, *given: tuple(x.new_empty(x.shape) for x in given[:count]))

    def by(run: Callable[..., Sequence[Tensor]], ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if x is None else x for x in ctx.others]
        kept = () if torch.is_grad_enabled() else ctx.kept
        return *run(grad, *given, *kept), *[None] * (len(given) - count)

    compiled.register_autograd(partial(by, gradients), setup_context=save_inputs)
    return eager_step(compiled, forward, partial(by, backward))


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the arguments of a step, tensors as autograd wants them and `ctx.others`."""
    ctx.kept = ()
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def eager_step(
    compiled: Callable[..., Tensor],
    forward: Callable[..., Tensor | _Kept],
    backward: Callable[..., Sequence[Tensor | None]],
) -> Callable[..., Tensor]:
    """`compiled` in graphs, else the same as an autograd.Function, at a third of its cost."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:
            # Not in setup_context, which takes as long as ten operations.
            ctx.save_for_backward(*(x for x in given if isinstance(x, Tensor)))
            ctx.others = [None if isinstance(x, Tensor) else x for x in given]
            out = forward(*given)
            result, ctx.kept = out if isinstance(out, tuple) else (out, ())
            return result

    Step.backward = staticmethod(backward)  # type: ignore[method-assign]
    apply: Any = Step.apply

    def call(*given: Any) -> Tensor:
        return (compiled if torch.compiler.is_compiling() else apply)(*given)

    return call


def operator(
    name: str, attend: Run, gradients: Run, cost: Cost, width: Callable[[int, str], int]
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]:
    """Attention as a function of (N, H, M), (K, H, M), (K, H, V), ptr, key_ptr and a mode.

    It returns (N, H, V), at least float32, and 0 for rows without a system or without keys; the
    same is there as ``torch.ops.flt_mol.NAME``, of (H, N, ·).

    Args:
        name: of the operator.
        attend: (q, k, v, rows, keys, mode) → (out,) of blocks (B, L, ·) of heads of systems; behind
            it may stand what `gradients` can have for q, k and v, and more.
        gradients: (gradient, q, k, v, rows, keys, mode, *more) → gradients to q, k, v.
        cost: numbers of the largest tensor of n queries, m keys and M features.
        width: V of the output, for V of the values and a mode.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str) -> _Kept:
        groups, outputs = _groups(q, k, ptr, key_ptr, cost), [(0, width(v.shape[-1], mode))]
        (out,), kept = _over_groups(attend, (q,), (k, v), groups, cost, outputs, mode)
        return out, kept

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str,
        *kept: Any,
    ) -> list[Tensor]:  # fmt: skip
        groups = _groups(q, k, ptr, key_ptr, cost)
        outputs = [(kind, x.shape[-1]) for kind, x in ((0, q), (1, k), (1, v))]
        return _over_groups(gradients, (grad, q), (k, v), groups, cost, outputs, mode, kept)[0]

    step = single_step(
        name,
        ("Tensor q, Tensor k, Tensor v", "Tensor ptr, Tensor key_ptr, str mode"),
        forward,
        lambda q, k, v, ptr, key_ptr, mode: (*q.shape[:2], width(v.shape[-1], mode)),
        backward,
    )

    def call(
        query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, key_ptr: Tensor, mode: str
    ) -> Tensor:
        rows = (x.transpose(0, 1) for x in settled(query, key, value))
        return step(*rows, ptr, key_ptr, mode).transpose(0, 1)

    return call


def gradients_of(
    run: Callable[..., Tensor], grad: Tensor, tensors: tuple[Tensor, ...], *others: Any
) -> tuple[Tensor, ...]:
    """Gradients of ``run(*tensors, *others)`` by autograd, differentiable where that is on."""
    higher = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(grad):
        # Aliases: where one input was computed from another, that way is not for this function.
        tensors = tuple(
            x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors
        )
        out = run(*tensors, *others)
        return torch.autograd.grad(out, tensors, grad, create_graph=higher, materialize_grads=True)


def real_only(x: Tensor, block: PaddedRows) -> Tensor:
    """0 in the slots of a block (B, L, F) that repeat a row."""
    if block.real is None:
        return x
    return (x.view(-1, *block.real.shape, x.shape[2]) * block.real[..., None]).view(x.shape)


_BothGroups = tuple[Groups, Groups, int]


def _groups(q: Tensor, k: Tensor, ptr: Tensor, key_ptr: Tensor, cost: Cost) -> _BothGroups:
    """The groups by queries, the same ones by keys, and their budget."""
    (heads, rows, width), others, costs = q.shape, k.shape[1], []
    offsets = key_offsets = row_offsets(ptr, rows)
    if key_ptr is not ptr:
        key_offsets = row_offsets(key_ptr, others, "key_ptr")
    for (a, b), (c, d) in zip(pairwise(offsets), pairwise(key_offsets), strict=True):
        n, m = b - a, d - c
        costs.append(heads * cost(n, m, width) if n and m else 0)
    given = q.device, budget_of(q.device), heads
    groups = by_keys = groups_of(tuple(costs), offsets, key_offsets, rows, *given)
    if offsets != key_offsets or rows != others:
        by_keys = groups_of(tuple(costs), key_offsets, offsets, others, *given)
    return groups, by_keys, given[1]


def _over_groups(
    run: Run,
    of_rows: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    given: _BothGroups,
    cost: Cost,
    outputs: list[tuple[int, int]],
    mode: str,
    kept: tuple[Any, ...] = (),
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """`run` on the blocks of all groups; each output is by query (0) or key (1), and has a width.

    A group of one system that is over the budget is taken in parts, some heads at a time. What
    `run` returns besides is kept, for a run on gradients, of a batch that fits the budget.
    """
    first = of_rows[-1]
    heads = first.shape[0]
    *groups, budget = given
    parts: list[list[Tensor]] = [[] for _ in outputs]
    more: tuple[Any, ...] = ()
    with without_autocast(first):
        for both in zip(groups[0].rows, groups[0].keys, strict=True):
            rows, keys = both
            size = rows.number * cost(rows.length, keys.length, first.shape[2])
            found: list[list[Tensor]] = [[] for _ in outputs]
            whole = len(groups[0].rows) == 1 and heads * size <= budget
            step = max(1, budget // size)
            for head in range(0, heads, step):
                some = slice(head, head + step)
                own = (rows.by_head(x[some]) for x in of_rows)
                others = (keys.by_head(x[some]) for x in of_keys)
                if kept and whole:
                    blocks = run(next(own), *kept[:3], rows, keys, mode, *kept[3:])
                else:
                    blocks = run(*own, *others, rows, keys, mode)
                for each, block, (kind, width) in zip(found, blocks, outputs, strict=False):
                    each.append(block.reshape(-1, both[kind].number * both[kind].length, width))
                if whole:
                    more = blocks[len(outputs) :]
                del blocks
            for part in parts:  # one after the other, as parts of large systems take memory
                each = found.pop(0)
                part.append(each[0] if len(each) == 1 else torch.cat(each))
    if not groups[0].rows:
        lengths = of_rows[0].shape[1], of_keys[0].shape[1]
        return [first.new_zeros(heads, lengths[kind], width) for kind, width in outputs], ()
    return [
        x[0] if len(x) == 1 and groups[kind].place is None else groups[kind].put_back(x, 1)
        for x, (kind, _) in zip(parts, outputs, strict=True)
    ], more
