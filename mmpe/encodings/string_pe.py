"""STRING: the general form of an exactly relative rotation, as a learned basis (Cayley) or circulant generators."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..encoding import AttentionTerms
from ..frequencies import geometric, split_planes
from ..positions import Positions
from ..precision import full_precision
from ..registry import register_encoding
from ..rotary import RotaryTable
from .coordinates import check_choice
from .lie import cayley, skew_symmetric
from .mapped_rotary import MappedRotaryEncoding
from .rotary import RotaryEncoding, RotaryTerms, check_rotary_dim
from .rotary_mixed import random_frames

Start = Literal["axial", "mixed", "repeated"]
_SOURCE = "STRING, arXiv 2502.02562"


def initial_frequencies(
    start: Start, base: float, axes: int, layers: int, heads: int, planes: int, device: torch.device | None = None
) -> Tensor:
    """Frequency vectors (L, H, A, F) on a geometric spectrum.

    Args:
        start: "axial": the planes of an axis turn along it alone; "mixed": the same in a random frame of each head;
            "repeated": every plane has one frequency on all axes.
        base: wavelength ratio of the spectrum.
        axes: axes A.
        layers: sets of blocks L.
        heads: sets of heads H.
        planes: planes F.
        device: where to build them.
    """
    if start == "repeated":
        return geometric(planes, base, device).expand(layers, heads, axes, planes).clone()
    if start == "mixed":
        frames = random_frames(layers, heads, axes, device=device)  # (L, H, A, A), columns are directions
    else:
        frames = torch.eye(axes, device=device).expand(layers, heads, axes, axes)
    groups = split_planes(planes, axes)
    return torch.cat([frames[..., a, None] * geometric(size, base, device) for a, size in enumerate(groups)], dim=-1)


@register_encoding("string_cayley")
class StringCayley(MappedRotaryEncoding):
    """Cayley-STRING: a learned orthogonal basis of every head, then rotation with learned frequency vectors.

    With the default start, S = 0, it begins as the rotary encoding of its frequencies. Prefix tokens are multiplied by
    P, too, and not rotated. `fold_` moves P into the projections for inference.

    Args:
        base: wavelength ratio of the initial frequencies.
        start: initial frequencies: "axial" (as `rope_axial`), "mixed" (as `rope_mixed`, random directions) or
            "repeated" (one frequency on all axes of a plane, which tells rows from columns only once trained).
        share_heads: learn one basis and one set of frequencies for all heads.
        share_layers: learn one set for all blocks.
    """

    per_layer = True
    equation = (
        "(q, k)_n <- R(theta_n) P (q, k)_n,  P = (I - S)(I + S)^-1,  S = -S^T\n"
        "theta[l,h,n,f] = sum_a p[n,a] freqs[l,h,a,f]"
    )
    source = _SOURCE
    parity = "formula"
    cost = "one D x D solve per head and block, one product per token, one rotation; folded: the rotation"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        base: float = 100.0,
        start: Start = "axial",
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        planes = check_rotary_dim(self.head_dim, self.head_dim)
        _check_start(start, base)
        self.base, self.start, self.share_layers = base, start, share_layers
        layers, heads = 1 if share_layers else depth, 1 if share_heads else heads
        self.skew = nn.Parameter(torch.empty(layers, heads, self.head_dim * (self.head_dim - 1) // 2))
        self.freqs = nn.Parameter(torch.empty(layers, heads, axes, planes))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start from the identity and the initial frequencies."""
        layers, heads, axes, planes = self.freqs.shape
        self.skew.zero_()
        self.freqs.copy_(initial_frequencies(self.start, self.base, axes, layers, heads, planes, self.freqs.device))
        self.folded = (False,) * self.depth

    @property
    def table_layers(self) -> int | None:
        """Blocks that the table has entries for; None if all blocks share it."""
        return None if self.share_layers else self.depth

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        return self.freqs[0] if self.share_layers else self.freqs

    def maps(self) -> tuple[Tensor, Tensor]:
        p = cayley(skew_symmetric(self.skew, self.head_dim))  # (L, H, D, D)
        return p, p

    def _set_identity(self, slot: int | slice) -> None:
        self.skew[slot] = 0.0


class CirculantTerms(RotaryTerms):
    """Rotation of q and k in the Fourier basis of every block of channels.

    Args:
        table: angles (..., N, m P) of the P = (b - 1) // 2 planes of each of the m blocks.
        block_size: channels b of a block.
        layers: number of blocks that the table holds; None if all blocks share it.
    """

    def __init__(self, table: RotaryTable, block_size: int, layers: int | None = None) -> None:
        super().__init__(table, layers=layers)
        self.block_size = block_size

    def layer(self, index: int) -> CirculantTerms:
        return self if self.layers is None else CirculantTerms(super().layer(index).table, self.block_size)

    def queries_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        table, k = self._table_of_one_block(), self._repeated(k)
        # Compilers and exporters know no complex numbers, and half precision no FFT: there the basis is a matrix.
        if torch.compiler.is_compiling() or q.dtype not in (torch.float32, torch.float64):
            return self._in_real_basis(table, q, k)
        phase = self._phase(table)
        return self._in_fourier_space(q, phase), self._in_fourier_space(k, phase)

    def _phase(self, table: RotaryTable) -> Tensor:
        """exp(i theta) (..., N, m, b // 2 + 1); the mean and, for even b, the alternating component stay: 1."""
        planes = (self.block_size - 1) // 2
        cos, sin = (t.unflatten(-1, (-1, planes)) for t in (table.cos, table.sin))
        edges = (1, self.block_size // 2 - planes)
        return torch.complex(
            nn.functional.pad(cos, edges, value=1.0),
            nn.functional.pad(sin, edges),
        )

    def _in_fourier_space(self, x: Tensor, phase: Tensor) -> Tensor:
        with full_precision(x):
            spectrum = torch.fft.rfft(x.unflatten(-1, (-1, self.block_size)))
            return torch.fft.irfft(spectrum * phase, n=self.block_size).flatten(-2).to(x.dtype)

    def _in_real_basis(self, table: RotaryTable, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        basis = fourier_basis(self.block_size, q.shape[-1] // self.block_size, q.device).to(q.dtype)
        with full_precision(q):
            q, k = table.rotate_pair(q @ basis, k @ basis)
            return q @ basis.mT, k @ basis.mT


def fourier_basis(block_size: int, blocks: int, device: torch.device | str | None = None) -> Tensor:
    """The real Fourier basis of m blocks of b channels as orthonormal columns: (m b, m b).

    The columns of planes come first, block by block, cosine and minus sine of each; then what is never rotated.
    """
    planes = (block_size - 1) // 2
    angle = _harmonics(block_size, device)
    rotated = torch.stack([angle.cos(), -angle.sin()], dim=-1).flatten(1) * (2.0 / block_size) ** 0.5
    fixed = torch.ones(block_size, block_size - 2 * planes, device=device)
    fixed[1::2, 1:] = -1.0  # the alternating component, which even sizes have beside the mean
    identity = torch.eye(blocks, device=device)
    return torch.cat([torch.kron(identity, rotated), torch.kron(identity, fixed / block_size**0.5)], dim=1)


def _harmonics(block_size: int, device: torch.device | str | None) -> Tensor:
    """2 pi j k / b for channels j = 0 .. b-1 and planes k = 1 .. P: (b, P), reduced to one turn."""
    channel = torch.arange(block_size, dtype=torch.float32, device=device)
    plane = torch.arange(1, (block_size - 1) // 2 + 1, dtype=torch.float32, device=device)
    return 2.0 * torch.pi * ((channel[:, None] * plane) % block_size) / block_size


@register_encoding("string_circulant")
class StringCirculant(RotaryEncoding):
    """Circulant-STRING: rotation by exponentials of circulant generators, in O(D log D) by the FFT.

    The generator of axis a is C_a - C_a^T with C_a[i,j] = c_a[(i - j) mod b] on every block of b channels; circulants
    commute, so attention sees offsets alone. The mean of a block (and its alternating component) is never rotated;
    prefix tokens stay as they are.

    Args:
        block_size: channels b of a circulant block, at least 3, a divisor of head_dim; None is the whole head.
        base: wavelength ratio of the initial rates.
        start: directions of the initial rates: "axial", "mixed" (random) or "repeated" (the same on all axes).
        share_heads: learn one set for all heads.
        share_layers: learn one set for all blocks.
    """

    per_layer = True
    equation = (
        "(q, k)_n <- irfft(rfft((q, k)_n) exp(i sum_a p[n,a] mu_a)),  mu_a = 2 Im rfft(c_a)\n"
        "that is exp(sum_a p[n,a] (C_a - C_a^T)) with circulant C_a"
    )
    source = _SOURCE
    parity = "formula"
    cost = "an FFT and an inverse FFT of q and k (two products with a fixed basis in half precision)"

    def __init__(
        self,
        dim: int,
        heads: int,
        axes: int = 2,
        depth: int = 1,
        block_size: int | None = None,
        base: float = 100.0,
        start: Start = "axial",
        share_heads: bool = False,
        share_layers: bool = False,
    ) -> None:
        super().__init__(dim, heads, axes, depth)
        size = self.head_dim if block_size is None else block_size
        if size < 3 or self.head_dim % size:
            raise ValueError(
                f"block_size={size} must be at least 3 (smaller circulants rotate nothing) and divide "
                f"head_dim={self.head_dim}"
            )
        _check_start(start, base)
        self.block_size, self.base, self.start, self.share_layers = size, base, start, share_layers
        layers, heads = 1 if share_layers else depth, 1 if share_heads else heads
        self.c = nn.Parameter(torch.empty(layers, heads, axes, self.head_dim // size, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set c so that the rates are the initial frequencies."""
        layers, heads, axes, blocks, size = self.c.shape
        planes = blocks * ((size - 1) // 2)
        mu = initial_frequencies(self.start, self.base, axes, layers, heads, planes, self.c.device)
        self.c.copy_(-(mu.unflatten(-1, (blocks, -1)) @ _harmonics(size, self.c.device).sin().mT) / size)

    @property
    def table_layers(self) -> int | None:
        """Blocks that the table has entries for; None if all blocks share it."""
        return None if self.share_layers else self.depth

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Rates mu = 2 Im rfft(c) of the planes, block by block -> (L, H, A, m P)."""
        with full_precision(self.c):
            mu = (-2.0 * (self.c @ _harmonics(self.block_size, self.c.device).sin())).flatten(-2)
        return mu[0] if self.share_layers else mu

    def forward(self, positions: Positions, x: Tensor | None = None, layer: int = 0) -> AttentionTerms:
        return CirculantTerms(self.rotary_table(positions), self.block_size, self.table_layers)


def _check_start(start: Any, base: float) -> None:
    check_choice("start", start, ("axial", "mixed", "repeated"))
    if not base > 0:
        raise ValueError(f"base must be greater than 0, got {base}")
