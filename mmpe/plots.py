"""Pictures of position encodings. Every function returns a matplotlib Figure, draws on `ax` if given, shows nothing.

    >>> import mmpe, mmpe.plots
    >>> enc = mmpe.create_encoding("rope_mixed", dim=384, heads=6, axes=2)
    >>> figure = mmpe.plots.attention_decay(enc, mmpe.Positions.grid(14, 14), token=(7, 7))

The colours are Okabe and Ito's, told apart by colour-blind readers; lines also differ in marker and dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .encoding import AttentionTerms, PositionEncoding
from .positions import Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .evaluation.tables import Row

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
AXIS_COLOURS = {"t": "#009E73", "h": "#0072B2", "w": "#D55E00", "n": "#000000"}


def new_figure(columns: int = 1, rows: int = 1, width: float = 4.2, height: float = 3.4, **options: Any) -> tuple:
    """A Figure that belongs to no window, and its axes as a flat list.

    Args:
        columns: panels side by side.
        rows: panels above each other.
        width: inches of one panel.
        height: inches of one panel.
        options: passed to `Figure.subplots`.

    Raises:
        ImportError: without matplotlib, with the line to type.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained", dpi=150)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def _panels(ax: Axes | Sequence[Axes] | None, count: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """The panels that were given, or those of a new figure."""
    if ax is None:
        columns = min(count, options.pop("columns", 3 if count % 4 and count % 3 == 0 else 4))
        figure, axes = new_figure(columns, math.ceil(count / columns), **options)
        for spare in axes[count:]:
            spare.set_axis_off()
        return figure, axes[:count]
    given: list[Any] = list(ax) if isinstance(ax, Iterable) else [ax]
    if len(given) < count:
        raise ValueError(f"this plot has {count} panels, ax holds {len(given)}")
    return given[0].figure, given[:count]


def frequencies(values: Tensor, axes: Sequence[str] = ("h", "w"), *, title: str = "", ax: Axes | None = None) -> Figure:
    """How fast each rotary plane turns along each axis, on a logarithmic scale.

    Args:
        values: (A, F) frequencies in radians per step, or (H, A, F) for several heads.
        axes: names of the A axes.
        title: text above the plot.
        ax: where to draw; by default a new figure.
    """
    heads = values.detach().abs().float().cpu().reshape(-1, *values.shape[-2:])  # (H, A, F)
    figure, (panel,) = _panels(ax, 1, width=5.2)
    spread = torch.linspace(-0.3, 0.3, len(heads)).tolist() if len(heads) > 1 else [0.0]
    for a, name in enumerate(axes):
        for h, head in enumerate(heads):
            turning = head[a] > 1e-12  # zeros have no place on a logarithmic axis
            planes = torch.arange(head.shape[-1])[turning] + spread[h]
            label = f"along {name}" if h == 0 else None
            panel.plot(
                planes, head[a][turning], marker=MARKERS[a], linestyle="none", markersize=4 if len(heads) > 1 else 6,
                alpha=0.75, color=AXIS_COLOURS.get(name, COLOURS[a]), label=label,
            )  # fmt: skip
    panel.set_yscale("log")
    panel.set(xlabel="rotary plane", ylabel="radians per step", title=title)
    panel.grid(alpha=0.3)
    panel.legend()
    _period_axis(panel)
    return figure


def frequency_plane(values: Tensor, *, title: str = "", ax: Axes | None = None) -> Figure:
    """The direction and speed of each rotary plane in 2D: one point (omega_w, omega_h) for each plane of each head.

    Args:
        values: (2, F) or (H, 2, F) frequencies, axes in the order (h, w).
        title: text above the plot.
        ax: where to draw; by default a new figure.
    """
    heads = values.detach().float().cpu().reshape(-1, *values.shape[-2:])  # (H, 2, F)
    if heads.shape[1] != 2:
        raise ValueError(f"frequency_plane draws two axes, got values of shape {tuple(values.shape)}")
    figure, (panel,) = _panels(ax, 1, width=4.6, height=4.0)
    for h, head in enumerate(heads):
        marker, colour = MARKERS[h % len(MARKERS)], COLOURS[h % len(COLOURS)]
        panel.plot(head[1], head[0], marker, color=colour, markersize=5, alpha=0.8, label=f"head {h}")
    bound = 1.1 * max(float(heads.abs().max()), 1e-6)
    panel.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    panel.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    panel.set(
        xlabel="radians per step along w", ylabel="radians per step along h", title=title,
        xlim=(-bound, bound), ylim=(bound, -bound), aspect="equal",
    )  # fmt: skip
    if 1 < len(heads) <= 12:
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def attention_decay(
    encoding: PositionEncoding,
    positions: Positions,
    token: Sequence[int] | None = None,
    *,
    layer: int = 0,
    content: Tensor | None = None,
    floor: float = -8.0,
    ax: Axes | Sequence[Axes] | None = None,
) -> Figure:
    """Attention scores of one token to all others if every token had the same content: one heat map per head.

    Args:
        encoding: what is drawn.
        positions: tokens that fill a line, a grid or a video; of a video the frame of the token is drawn.
        token: indices of the token on the grid; the middle by default.
        layer: block whose terms are drawn.
        content: (C,) content of all tokens; by default ones, as normalised features have on average.
        floor: the darkest colour stands for this score below the maximum, or for the lowest if none is as low.
        ax: one panel for each head; by default a new figure.
    """
    token = _token(positions, token)
    index = _flat_index(positions, token)
    heads = scores(encoding, positions, layer=layer, content=content)[0, :, index]  # (H, N)
    maps = [_plane(head - head.max(), positions, token) for head in heads]
    floor = max(floor, min(-0.1, *(float(grid.min()) for grid in maps)))
    figure, panels = _panels(ax, len(maps), width=2.5, height=2.5)
    for h, (panel, grid) in enumerate(zip(panels, maps, strict=True)):
        image = panel.imshow(grid.clamp(min=floor).numpy(), cmap="cividis", vmin=floor, vmax=0, interpolation="nearest")
        _mark(panel, positions, token)
        panel.set_title(f"head {h}", fontsize="medium")
    figure.colorbar(image, ax=panels, label="score below the maximum", shrink=0.8)
    if ax is None:
        figure.suptitle(f"{name_of(encoding)}, block {layer}: scores of the marked token to equal contents")
    return figure


def similarity(
    encoding: PositionEncoding,
    positions: Positions,
    tokens: Sequence[Sequence[int]] | None = None,
    *,
    layer: int = 0,
    head: int = 0,
    ax: Axes | Sequence[Axes] | None = None,
) -> Figure:
    """Similarity of chosen tokens to all others by position alone: one map for each chosen token.

    For a token encoding it is the cosine of what is added to empty tokens; otherwise the score between equal contents,
    shifted and divided so that the token itself is at 1 and the least similar one at 0 or below.

    Args:
        encoding: what is drawn.
        positions: tokens that fill a line or a grid.
        tokens: grid indices of the chosen tokens; by default a 3 x 3 choice over the grid.
        layer: block whose terms are drawn.
        head: head whose scores are drawn.
        ax: one panel for each chosen token; by default a new figure.
    """
    chosen = [tuple(t) for t in tokens] if tokens is not None else _spread(positions)
    matrix, label = _similarity_matrix(encoding, positions, layer, head)
    figure, panels = _panels(ax, len(chosen), width=2.4, height=2.1)
    for panel, token in zip(panels, chosen, strict=True):
        values = _plane(matrix[_flat_index(positions, token)], positions, token)
        image = panel.imshow(values.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        _mark(panel, positions, token)
        panel.set_title(f"token {tuple(token)}", fontsize="small")
    figure.colorbar(image, ax=panels, label=label, shrink=0.8)
    if ax is None:
        figure.suptitle(f"{name_of(encoding)}: similarity by position")
    return figure


def extrapolation(
    rows: Sequence[Row],
    *,
    positions: str = "raw",
    title: str = "",
    ylabel: str = "accuracy (%)",
    legend: bool = True,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Score against size: mean over seeds as a line, one standard deviation as a band.

    Args:
        rows: what `mmpe.evaluation.tables.summarise` returned.
        positions: draw the rows of this way of feeding positions, and those where it makes no difference.
        title: text above the plot.
        ylabel: what the scores are.
        legend: draw the legend, to the right of the plot.
        names: all encodings of a set of plots, so that each looks the same in all of them.
        ax: where to draw; by default a new figure.
    """
    figure, (panel,) = _panels(ax, 1, width=6.0, height=3.8)
    names = list(names or dict.fromkeys(row.encoding for row in rows))
    for row in rows:
        if row.positions not in (positions, "any"):
            continue
        i = names.index(row.encoding)
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        dash = DASHES[(i // len(COLOURS)) % len(DASHES)]
        sizes = sorted(row.scores)
        mean = [100 * row.scores[s].mean for s in sizes]
        std = [100 * (row.scores[s].std or 0.0) for s in sizes]
        panel.plot(sizes, mean, marker + dash, color=colour, label=row.encoding, linewidth=1.8, markersize=5)
        low, high = zip(*((m - s, m + s) for m, s in zip(mean, std, strict=True)), strict=True)
        panel.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
    ticks = sorted({size for row in rows for size in row.scores})
    panel.set_xticks(ticks, [f"{size:g}x" for size in ticks])
    panel.set(xlabel="size, in training sizes", ylabel=ylabel, title=title)
    panel.grid(alpha=0.3)
    if legend:
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def extrapolation_panels(tasks: Sequence[tuple[str, Sequence[Row]]], ylabel: str = "accuracy (%)") -> Figure:
    """One line of panels for each task, one panel for each way of feeding positions.

    Args:
        tasks: titles and rows.
        ylabel: what the scores are.
    """
    from .evaluation.tables import positions_of

    names = list(dict.fromkeys(row.encoding for _, rows in tasks for row in rows))
    # A part of the figure for each task: its legend then takes room from its own panels only.
    widest = max(len(positions_of(rows)) for _, rows in tasks)
    whole, _ = new_figure(width=4.6 * widest + 1.8, height=3.8 * len(tasks))
    whole.clear()
    parts = whole.subfigures(len(tasks), 1, squeeze=False)[:, 0]
    for part, (name, rows) in zip(parts, tasks, strict=True):
        ways = positions_of(rows)
        panels = part.subplots(1, len(ways), squeeze=False, sharey=True)[0]
        for p, (panel, way) in enumerate(zip(panels, ways, strict=True)):
            title = name if way == "any" else f"{name}: {way} positions"
            last = p == len(ways) - 1
            label = "" if p else ylabel
            extrapolation(rows, positions=way, title=title, ylabel=label, legend=last, names=names, ax=panel)
    return whole


def scores(
    encoding: PositionEncoding, positions: Positions, *, layer: int = 0, content: Tensor | None = None
) -> Tensor:
    """(1, H, N, N) attention scores by position alone: all N positioned tokens have the same content.

    Args:
        encoding: any encoding; token terms are added to the content, which is used as query and key unprojected.
        positions: where the tokens are; prefix tokens are left out.
        layer: block whose terms are used.
        content: (C,) content of all tokens; ones by default.
    """
    bare = Positions(positions.coords, positions.axes, positions.grid_size, 0, positions.extent)
    content = torch.ones(encoding.dim) if content is None else content
    x = content.to(bare.device).expand(1, bare.num_tokens, -1)  # (1, N, C)
    with torch.no_grad():
        x = encoding.embed(x, bare, layer=layer)
        terms: AttentionTerms = encoding(bare, x, layer=layer).layer(layer)
        heads = terms.inputs(x).unflatten(-1, (encoding.heads, encoding.head_dim)).transpose(1, 2)  # (1, H, N, D)
        q, k = terms.queries_keys(heads, heads)
        scale = encoding.head_dim**-0.5
        factor = 1.0 if terms.temperature is None else terms.temperature
        logits = (q @ k.transpose(-1, -2)) * scale * factor
        bias = terms.bias(q, k)
    return logits if bias is None else logits + bias


def name_of(encoding: PositionEncoding) -> str:
    """The registered name, or those of the parts of a sum."""
    return encoding.name or "+".join(part.name for part in getattr(encoding, "parts", ())) or type(encoding).__name__


def _similarity_matrix(encoding: PositionEncoding, positions: Positions, layer: int, head: int) -> tuple[Tensor, str]:
    """(N, N) similarity and what it is called."""
    bare = Positions(positions.coords, positions.axes, positions.grid_size, 0, positions.extent)
    with torch.no_grad():
        added = encoding.embed(torch.zeros(1, bare.num_tokens, encoding.dim, device=bare.device), bare, layer=layer)[0]
    if bool(added.abs().max() > 0):
        unit = added / added.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return unit @ unit.T, "cosine of the token terms"
    logits = scores(encoding, positions, layer=layer)[0, head]  # (N, N)
    own = logits.diagonal()[:, None]
    return 1 + (logits - own) / encoding.head_dim**0.5, "score relative to itself"


def _period_axis(panel: Axes) -> None:
    """A second axis that says how many steps one turn takes."""
    turn = 2 * math.pi

    def period(omega: Any) -> Any:
        return turn / (omega + 1e-30)

    panel.secondary_yaxis("right", functions=(period, period)).set_ylabel("steps per turn")


def _grid(positions: Positions) -> tuple[int, ...]:
    if positions.grid_size is None:
        raise ValueError("only tokens that fill a grid can be drawn as a map; use Positions.grid, .line or .video")
    return positions.grid_size


def _token(positions: Positions, token: Sequence[int] | None) -> tuple[int, ...]:
    grid = _grid(positions)
    if token is None:
        return tuple(size // 2 for size in grid)
    if len(token) != len(grid) or any(not 0 <= i < size for i, size in zip(token, grid, strict=True)):
        raise ValueError(f"token {tuple(token)} is not on the grid {grid}; give one index from 0 for each axis")
    return tuple(token)


def _flat_index(positions: Positions, token: Sequence[int]) -> int:
    index = 0
    for i, size in zip(_token(positions, token), _grid(positions), strict=True):
        index = index * size + i
    return index


def _plane(values: Tensor, positions: Positions, token: Sequence[int]) -> Tensor:
    """(N,) values as the picture that holds the token: a line as one row, a video as the token's frame."""
    grid = values.float().cpu().reshape(_grid(positions))
    if grid.dim() == 1:
        return grid[None]
    return grid if grid.dim() == 2 else grid[token[0]]


def _mark(panel: Axes, positions: Positions, token: Sequence[int]) -> None:
    row, column = (0, token[0]) if positions.num_axes == 1 else tuple(token)[-2:]
    for colour, width in (("black", 3.2), ("white", 1.4)):  # seen on every colour of a map
        panel.plot(column, row, marker="o", markersize=7, markerfacecolor="none", markeredgecolor=colour, mew=width)
    panel.set_xticks([])
    panel.set_yticks([])


def _spread(positions: Positions) -> list[tuple[int, ...]]:
    """A choice of tokens over the grid: three along each of the last two axes."""
    grid = _grid(positions)
    ends = [sorted({0, size // 2, size - 1}) for size in grid[-2:]]
    first = tuple(size // 2 for size in grid[:-2])
    if len(grid) == 1:
        return [(i,) for i in ends[0]]
    return [(*first, i, j) for i in ends[0] for j in ends[1]]
