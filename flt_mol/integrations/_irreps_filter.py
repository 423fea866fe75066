"""Sums over neighbour pairs of tensor products with spherical harmonics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, without_autocast
from flt_mol.functional.numerics import draw_normal, placed, seeded_generator
from flt_mol.functional.pairs import segment_sum
from flt_mol.integrations._irreps import IrrepsLinear
from flt_mol.integrations._irreps_layout import cleaned, o3
from flt_mol.nn.layers import applied, drawn_linear
from flt_mol.nn.local_filter import LocalGeometry, check_features
from flt_mol.nn.radial import check_sizes


class IrrepsPairFilter(nn.Module):
    r"""out_i = O(Σ_j Σ_path R_path(r_ij) · (U x_j) ⊗_path Y(r̂_ij)): how directions get in.

    The convolution of tensor field networks [1] in the channelwise form of NequIP [2]: every
    channel of U x_j times spherical harmonics of r_i − r_j, on every path to an irrep of
    `irreps_out`, weighted by functions of the distance, R = W₂ SiLU(W₁ B(r)), one per channel and
    path, 0 from the cutoff on. U and O are linear per irrep. An unnormalised sum over all periodic
    pairs: equivariant to O(3) and permutations, invariant to translations, the same in a supercell,
    and linear in x. Forces through it are continuous.

    Tensor products are e3nn's and formed for each pair: memory O(P·W), W the components of all
    paths' products together, which is what bounds the size of a batch. A pair at distance 0 has
    no direction: only l = 0 adds to its sum.

    Args:
        irreps_in: e3nn irreps of the features, as "32x0e".
        irreps_out: of what comes out, if not `irreps_in`, as "32x0e + 16x1o".
        lmax: largest l of the spherical harmonics.
        num_basis: T, as of the `nn.LocalBasis` that makes the geometry.
        hidden_dim: width of the radial net's hidden layer; None for R linear in the basis.
        generator: on CPU, for all weights; None takes a seed from torch's global one.

    Raises:
        ValueError: a size below 1, or irreps in `irreps_out` that no product gives.

    References:
        [1] Thomas et al., "Tensor field networks: Rotation- and translation-equivariant neural
        networks for 3D point clouds", 2018, equation 3.
        [2] Batzner et al., "E(3)-equivariant graph neural networks for data-efficient and accurate
        interatomic potentials", Nature Communications 2022.

    Example:
        >>> from flt_mol.functional.neighbors import neighbor_pairs
        >>> from flt_mol.nn import LocalBasis
        >>> r, ptr = 3 * torch.rand(5, 3), torch.tensor([0, 5])
        >>> cell, pbc = 4 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool)
        >>> pairs = neighbor_pairs(r, cell, pbc, ptr, cutoff=3.0)
        >>> basis = LocalBasis(cutoff=3.0, num_basis=8)
        >>> local = basis(pairs, pairs.vectors(r, cell, ptr), num_rows=5)
        >>> layer = IrrepsPairFilter("8x0e", "8x0e + 4x1o", lmax=1, num_basis=8)
        >>> layer(torch.randn(5, 8), local).shape
        torch.Size([5, 20])
    """

    def __init__(
        self,
        irreps_in: str | o3.Irreps,
        irreps_out: str | o3.Irreps | None = None,
        lmax: int = 2,
        num_basis: int = 32,
        hidden_dim: int | None = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_basis=num_basis, hidden_dim=hidden_dim)
        if lmax < 0:
            raise ValueError(f"lmax is {lmax}, expected a number ≥ 0")
        self.irreps_in = cleaned(irreps_in)
        self.irreps_out = self.irreps_in if irreps_out is None else cleaned(irreps_out)
        self.irreps_sh = o3.Irreps.spherical_harmonics(lmax)
        self._dim = self.irreps_in.dim
        self.num_basis = num_basis
        generator = seeded_generator(generator)
        self.harmonics = _Harmonics(lmax)
        self.product = _products(self.irreps_in, self.irreps_sh, self.irreps_out)
        self._set_constants()
        width = num_basis if hidden_dim is None else hidden_dim
        self.hidden = (
            None if hidden_dim is None else drawn_linear(num_basis, width, False, generator)
        )
        start = draw_normal(width, self.product.weight_numel, generator=generator) * width**-0.5
        self.weight = nn.Parameter(placed(start))
        self.value = IrrepsLinear(self.irreps_in, self.irreps_in, generator=generator)
        self.out = IrrepsLinear(self.product.irreps_out, self.irreps_out, generator=generator)
        self.register_load_state_dict_post_hook(_reset_constants)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, local: LocalGeometry) -> Tensor:
        """Features (N, irreps_in.dim) to (N, irreps_out.dim).

        Args:
            x: (N, irreps_in.dim), packed.
            local: what an `nn.LocalBasis` of `num_basis` functions gives.

        Raises:
            ValueError: rows that do not belong to these pairs, or a basis of another size.
        """
        pairs = local.pairs
        check_features(x, self._dim)
        if local.basis.shape[1] != self.num_basis:
            raise ValueError(
                f"local has {local.basis.shape[1]} radial functions, this filter takes "
                f"{self.num_basis}: give both the same num_basis"
            )
        value = self.value(x)
        with without_autocast(value):
            dtype = at_least_float32(value).dtype
            sent = value.to(dtype)[pairs.index_j]
            harmonics, radial = self._directions(local).to(dtype), self._radial(local).to(dtype)
            message = self.product(sent, harmonics, radial)
            summed = segment_sum(message, pairs.index_i, x.shape[0])
        out: Tensor = self.out(summed.to(value.dtype))
        return out

    def _directions(self, local: LocalGeometry) -> Tensor:
        """Y(r̂) (P, (lmax + 1)²), of mean square 1; 0 for l > 0 where there is no direction."""
        zero = local.distances == 0
        # No gradient either: at distance 0 that of a direction has no bound.
        inverse = local.distances.masked_fill(zero, 1.0).reciprocal().masked_fill(zero, 0.0)
        out: Tensor = self.harmonics(local.vectors * inverse[:, None])
        return out

    def _radial(self, local: LocalGeometry) -> Tensor:
        """R (P, channels of all paths). Without biases: 0 where the basis is."""
        basis = local.basis
        if self.hidden is not None:
            basis = nn.functional.silu(applied(self.hidden, basis))
        return basis @ self.weight.to(basis.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._set_constants()
        return self

    def _set_constants(self) -> None:
        """Coupling coefficients in full precision: e3nn rounds them to the default dtype.

        At least float32 too, as products are: converting the layer back and forth loses nothing.
        """
        for module in self.product.modules():
            for name, constant in module.named_buffers(recurse=False):
                if name.startswith("_w3j_"):
                    kind = torch.promote_types(constant.dtype, torch.float32)
                    ls = (int(number) for number in name.removeprefix("_w3j_").split("_"))
                    exact = o3.wigner_3j(*ls, dtype=kind, device=constant.device)
                    setattr(module, name, exact)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{self.irreps_in} -> {self.irreps_out}, lmax={self.irreps_sh.lmax}"


class _Harmonics(o3.SphericalHarmonics):  # type: ignore[misc]
    """Y of l = 0 … lmax, of mean square 1, that can be copied where e3nn uses TorchScript."""

    def __init__(self, lmax: int) -> None:
        self.lmax = lmax
        irreps = o3.Irreps.spherical_harmonics(lmax)
        super().__init__(irreps, normalize=False, normalization="component")

    def __reduce__(self) -> tuple[type[_Harmonics], tuple[int]]:
        return _Harmonics, (self.lmax,)


def _reset_constants(module: nn.Module, _: object) -> None:
    assert isinstance(module, IrrepsPairFilter)
    module._set_constants()


def _products(
    irreps_in: o3.Irreps, irreps_sh: o3.Irreps, irreps_out: o3.Irreps
) -> o3.TensorProduct:
    """Products x ⊗ Y on all paths to irreps of `irreps_out`, a weight per pair, channel and path.

    Raises:
        ValueError: an irrep that no path leads to.
    """
    wanted = {term.ir for term in irreps_out}
    paths = [
        (first, second, ir, term.mul)
        for first, term in enumerate(irreps_in)
        for second, harmonic in enumerate(irreps_sh)
        for ir in term.ir * harmonic.ir
        if ir in wanted
    ]
    missing = sorted(wanted - {ir for _, _, ir, _ in paths})
    if missing:
        raise ValueError(
            f"irreps_out {irreps_out} hold {', '.join(map(str, missing))}, which no product of "
            f"{irreps_in} with {irreps_sh} gives: leave it out, or raise lmax"
        )
    sums, place, _ = o3.Irreps([(mul, ir) for _, _, ir, mul in paths]).sort()
    instructions = [
        (first, second, place[k], "uvu", True) for k, (first, second, _, _) in enumerate(paths)
    ]
    return o3.TensorProduct(
        irreps_in,
        irreps_sh,
        sums,
        instructions,
        internal_weights=False,
        shared_weights=False,
    )
