"""One suite for every registered encoding, in every number of axes: what a user may take for granted.

A new encoding is tested here the moment it is registered. A docstring that begins with "Fault:" names a kind of fault
that users reported to other libraries.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import (
    CASES,
    DIM,
    GRIDS,
    HEADS,
    IDS,
    LARGER,
    TinyTransformer,
    build,
    fresh,
    loose,
    probe,
    tokens,
    transformer,
)

import mmpe
from mmpe.registry import encoding_class, option_names

ISOTROPIC = {"permutation_equivariant", "rotation_invariant"}
KINDS = {"none", "token", "rotary", "bias", "parabolic"}
every = pytest.mark.parametrize(("name", "axes"), CASES, ids=IDS)
named = pytest.mark.parametrize("name", mmpe.list_encodings())


def grid(axes: int, prefix: int = 1, sizes: tuple[int, ...] | None = None, **where: Any) -> mmpe.Positions:
    return mmpe.Positions.of_size(sizes or GRIDS[axes], prefix=prefix, **where)


def same(ours: Any, theirs: Any, atol: float = 0.0, rtol: float = 0.0) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


# ---------------------------------------------------------------- shapes, dtypes, grids


@every
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_shape_and_dtype_are_those_of_the_input(name: str, axes: int, prefix: int, dtype: torch.dtype):
    net, positions = transformer(name, axes), grid(axes, prefix)
    x = tokens(positions)
    exact = net(x, positions).detach()
    out = net.to(dtype)(x.to(dtype), positions)
    assert out.shape == x.shape
    assert out.dtype == dtype
    scale = float(exact.abs().max())
    same(out.float(), exact, atol={torch.float32: 0.0, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype] * scale)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_terms_keep_the_dtype_of_q_k_v(name: str, axes: int, dtype: torch.dtype):
    enc, positions = build(name, axes).to(dtype), grid(axes)
    x = tokens(positions).to(dtype)
    q = torch.randn(3, HEADS, positions.num_tokens, DIM // HEADS, dtype=dtype)
    for layer in range(enc.depth):
        terms = enc(positions, x, layer=layer) if enc.content_dependent else enc(positions).layer(layer)
        assert {t.dtype for t in terms.queries_keys(q, q)} == {dtype}
        assert terms.values(q).dtype == terms.outputs(q).dtype == dtype
        assert enc.embed(x, positions, layer).dtype == terms.inputs(x).dtype == dtype


@every
def test_larger_grids_than_the_trained_one_need_no_change(name: str, axes: int):
    """Fault: a grid beyond the trained one overruns a table (diffusers#12656) or is refused."""
    net, positions = transformer(name, axes), grid(axes, sizes=LARGER[axes])
    out = net(tokens(positions), positions)
    assert out.shape == (3, positions.num_tokens, DIM)
    assert torch.isfinite(out).all()


@every
def test_one_cell(name: str, axes: int):
    net, positions = transformer(name, axes), grid(axes, prefix=0, sizes=(1,) * axes)
    assert torch.isfinite(net(tokens(positions), positions)).all()


@every
def test_transposed_grid_is_another_grid(name: str, axes: int):
    """Fault: width and height swapped on grids that are not square (dino#8): columns must not be read as rows."""
    sizes = GRIDS[axes]
    net, wide, tall = transformer(name, axes), grid(axes, 0), grid(axes, 0, tuple(reversed(sizes)))
    # The same tokens, laid out both ways: token (i, j) of one grid is token (j, i) of the other.
    x = tokens(wide)
    order = torch.arange(x.shape[1]).reshape(sizes).permute(*reversed(range(axes))).flatten()
    back = torch.argsort(order)
    direct, swapped = net(x, wide), net(x[:, order], tall)[:, back]
    promises = set(encoding_class(name).promises)
    if axes == 1 or ISOTROPIC & promises or (axes == 2 and "transpose_invariant" in promises):
        same(swapped, direct, atol=1e-5)
    else:
        assert (swapped - direct).abs().max() > 1e-4


@every
def test_prefix_tokens_stand_apart(name: str, axes: int):
    """The patches' positions do not depend on the number of prefix tokens (hidden from attention here)."""
    net, bare, led = transformer(name, axes, depth=1), grid(axes, 0), grid(axes, 3)
    x = tokens(led)
    visible = torch.ones(led.num_tokens, led.num_tokens, dtype=torch.bool)
    visible[3:, :3] = False
    same(net(x, led, mask=visible)[:, 3:], net(x[:, 3:], bare), atol=1e-5)


# ---------------------------------------------------------------- positions per sample, dropped tokens


@every
def test_points_on_a_grid_are_the_grid(name: str, axes: int):
    """Fault: positions per sample unsupported (x-transformers#299), or mixed up with heads (timm#2549)."""
    net, positions = transformer(name, axes), grid(axes)
    x = tokens(positions)
    if net.enc.needs_grid:
        with pytest.raises(ValueError, match="fill a grid"):
            net(x, loose(positions))
        return
    expected = net(x, positions)
    same(net(x, loose(positions)), expected, atol=1e-5)
    same(net(x, loose(positions, batch=3)), expected, atol=1e-5)


@every
def test_every_sample_has_its_own_positions(name: str, axes: int):
    """Tokens in another order with their positions in that order give the outputs in that order, sample by sample."""
    net, positions = transformer(name, axes), grid(axes)
    x = tokens(positions)
    shuffled = torch.stack([torch.randperm(len(positions.coords)) for _ in range(len(x))])
    everything = torch.cat([torch.zeros(len(x), 1, dtype=torch.long), shuffled + 1], dim=1)[..., None].expand_as(x)
    if net.enc.needs_grid:
        with pytest.raises(ValueError, match="fill a grid"):
            net(x, positions.keep(shuffled))
        return
    moved = net(torch.gather(x, 1, everything), positions.keep(shuffled))
    same(moved, torch.gather(net(x, positions), 1, everything), atol=1e-5)


@every
def test_dropped_tokens_leave_the_others_where_they_were(name: str, axes: int):
    """Fault: patch dropout crashes or shifts positions (timm#2549: 12 heads against batch 8; here 4 against 3)."""
    net, positions = transformer(name, axes, depth=1), grid(axes)
    x, count = tokens(positions), len(positions.coords)
    kept = torch.stack([torch.randperm(count)[: count // 2].sort().values for _ in range(len(x))])  # (B, K)
    index = torch.cat([torch.zeros(len(x), 1, dtype=torch.long), kept + 1], dim=1)
    visible = torch.zeros(len(x), 1, 1, count + 1, dtype=torch.bool).scatter(-1, index[:, None, None], True)
    if net.enc.needs_grid:
        with pytest.raises(ValueError, match="fill a grid"):
            net(x, positions.keep(kept))
        return
    full = net(x, positions, mask=visible)
    index = index[..., None].expand(-1, -1, DIM)
    found, expected = net(torch.gather(x, 1, index), positions.keep(kept)), torch.gather(full, 1, index)
    if net.enc.cumulative:  # what is dropped is not counted
        assert (found - expected).abs().max() > 1e-4
    else:
        same(found, expected, atol=1e-5)


@every
def test_nothing_is_remembered_between_calls(name: str, axes: int):
    """Fault: a second call with other positions gets the angles of the first (rotary-embedding-torch#11)."""
    enc, small, large = build(name, axes), grid(axes), grid(axes, sizes=LARGER[axes])
    first, second, third = probe(enc, small), probe(enc, large), probe(enc, small)
    same(third, first)
    same(second, probe(build(name, axes), large))


@every
def test_forward_writes_no_attribute(name: str, axes: int):
    """Fault: tensors freshly assigned to the module make every step recompile (diffusers#10959)."""
    enc = build(name, axes)
    before = [dict(m.__dict__) for m in enc.modules()]
    buffers = {n: b.clone() for n, b in enc.named_buffers()}
    probe(enc, grid(axes))
    for module, old in zip(enc.modules(), before, strict=True):
        assert module.__dict__.keys() == old.keys()
        assert all(module.__dict__[key] is value for key, value in old.items())
    same(dict(enc.named_buffers()), buffers)


# ---------------------------------------------------------------- gradients, state


@every
def test_gradients_reach_every_parameter(name: str, axes: int):
    net, positions = transformer(name, axes), grid(axes, prefix=0)
    out = net(tokens(positions), positions)
    (out * torch.randn_like(out)).sum().backward()
    for key, p in net.enc.named_parameters():
        assert p.grad is not None, f"{key} gets no gradient"
        assert torch.isfinite(p.grad).all()
        assert p.grad.abs().max() > 0, f"the gradient of {key} is zero"


@every
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
def test_activation_checkpointing_changes_nothing(name: str, axes: int, amp: bool):
    """Fault: recomputed tensors have another dtype when float32 tables enter a block (miles_diffusion#15)."""
    net, positions = transformer(name, axes), grid(axes)
    gradients = []
    for recompute in (False, True):
        net.zero_grad()
        x = tokens(positions).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            shared = None if net.enc.content_dependent else net.enc(positions)
            h = x
            for layer in range(net.enc.depth):
                h = net.enc.embed(h, positions, layer)
                arguments = (h, positions, shared, layer)
                if recompute:
                    h = h + checkpoint(net.attention, *arguments, use_reentrant=False)
                else:
                    h = h + net.attention(*arguments)
        h.float().square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
    same(gradients[1], gradients[0])


@every
def test_state_dict_round_trip(name: str, axes: int):
    enc, positions = build(name, axes), grid(axes)
    file = io.BytesIO()
    torch.save(enc.state_dict(), file)
    file.seek(0)
    other = fresh(name, axes)
    other.load_state_dict(torch.load(file, weights_only=True))
    same(probe(other, positions), probe(enc, positions))
    assert set(dict(other.named_parameters())) >= other.no_weight_decay()


@every
def test_copies_and_pickles_are_equal(name: str, axes: int):
    enc, positions = build(name, axes), grid(axes)
    expected = probe(enc, positions)
    same(probe(copy.deepcopy(enc), positions), expected)
    same(probe(pickle.loads(pickle.dumps(enc)), positions), expected)


@every
def test_meta_device_then_to_empty_then_reset(name: str, axes: int):
    """Fault: frequencies are random memory after meta -> to_empty (transformers#45902)."""
    built = fresh(name, axes)
    with torch.device("meta"):
        enc = fresh(name, axes)
    assert all(t.is_meta for t in (*enc.parameters(), *enc.buffers()))
    enc.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*enc.parameters(), *enc.buffers()):
            t.fill_(float("nan") if t.is_floating_point() else -1)
    for module in (enc, built):
        torch.manual_seed(7)
        module.reset_parameters()
        module.init_non_persistent_buffers()
    same(enc.state_dict(), built.state_dict())
    same(probe(enc, grid(axes)), probe(built, grid(axes)))


@every
def test_reset_draws_what_the_constructor_draws(name: str, axes: int):
    constructed, drawn = fresh(name, axes), fresh(name, axes)
    drawn.reset_parameters()
    for old, new in zip(constructed.parameters(), drawn.parameters(), strict=True):
        # Two draws of few numbers differ by more than two of many.
        spread = (0.3 + 4.0 / old.numel() ** 0.5) * float(old.detach().std())
        same((new.mean(), new.std()), (old.mean(), old.std()), atol=spread + 1e-6)


@every
def test_everything_is_built_on_the_device_of_the_positions(name: str, axes: int):
    """Fault: tables built on the CPU (diffusers#9299, rotary-embedding-torch#48), or Python branches on tensor values
    (torchtitan#612). On the meta device both are errors.
    """
    enc = build(name, axes).to("meta")
    assert all(t.is_meta for t in probe(enc, grid(axes, device="meta")))


# ---------------------------------------------------------------- precision


def far_away(axes: int) -> mmpe.Positions:
    positions = grid(axes, sizes=LARGER[axes])
    return mmpe.Positions.points(positions.coords + 4097.0, prefix=1, extent=[size + 4097 for size in LARGER[axes]])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_casting_the_model_leaves_the_tables_alone(name: str, axes: int, dtype: torch.dtype):
    """Fault: cos/sin differ when the model was cast first (transformers#25681), bf16 angles (nanogpt#39)."""
    enc = build(name, axes)
    positions = grid(axes) if enc.needs_grid else far_away(axes)
    before = probe(enc, positions)
    enc.to(dtype)
    # Projections of content are weights like those of the backbone, and may be cast with them.
    atol = 0.05 if enc.content_dependent else 0.0
    for now in (probe(enc, positions), probe(enc.to(torch.float32), positions)):
        same(now, before, atol=atol, rtol=atol)


@every
def test_casting_keeps_the_parameters_of_the_optimiser(name: str, axes: int):
    enc = build(name, axes)
    before = list(enc.parameters())
    enc.to(torch.bfloat16)
    assert all(new is old for new, old in zip(enc.parameters(), before, strict=True))


@every
def test_autocast_leaves_the_terms_alone(name: str, axes: int):
    """Fault: training drifts because angles are computed in bf16 under autocast (transformers#29285)."""
    enc = build(name, axes)
    positions = grid(axes) if enc.needs_grid else far_away(axes)
    expected = probe(enc, positions)
    with torch.autocast("cpu", torch.bfloat16):
        found = probe(enc, positions)
    # What depends on content passes through a convolution or a projection, which autocast is meant to lower.
    atol = 0.1 if enc.content_dependent or enc.needs_grid else 0.0
    for ours, theirs in zip(found, expected, strict=True):
        same(ours.float(), theirs, atol=atol, rtol=atol)


# ---------------------------------------------------------------- compilation, export


@every
def test_compiles_into_one_graph(name: str, axes: int):
    """Fault: complex numbers or hidden state break the graph (diffusers#12668)."""
    torch._dynamo.reset()
    net, positions = transformer(name, axes), grid(axes)
    x = tokens(positions)
    compiled = torch.compile(net, fullgraph=True, backend="eager", dynamic=False)
    same(compiled(x, positions), net(x, positions), atol=1e-5)


ONE_OF_EACH_KIND = sorted({encoding_class(name).kind: name for name in mmpe.list_encodings(axes=2)}.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_inductor_gives_the_same_values_and_gradients(name: str):
    torch._dynamo.reset()
    net, positions = transformer(name, 2), grid(2)
    found = []
    for forward in (net, torch.compile(net, fullgraph=True)):
        net.zero_grad()
        out = forward(tokens(positions), positions)
        out.square().sum().backward()
        found.append([out, *(p.grad for p in net.parameters())])
    same(found[1], found[0], atol=1e-3, rtol=1e-4)


class OnImages(nn.Module):
    """The transformer on feature maps (B, C, h, w) of any size, as an exported model sees them."""

    def __init__(self, net: TinyTransformer) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        positions = mmpe.Positions.grid(x.shape[-2], x.shape[-1], device=x.device)
        return self.net(x.flatten(2).transpose(1, 2), positions)


@pytest.mark.parametrize("name", mmpe.list_encodings(axes=2))
def test_exports_without_complex_numbers(name: str):
    """Fault: exporters know no complex type and no aten::polar (sam2#186, onnx#6480)."""
    model = OnImages(transformer(name, 2))
    x = torch.randn(2, DIM, 4, 6)
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.export.export(model, (x,), dynamic_shapes=(sizes,))
    for node in program.graph.nodes:
        value = node.meta.get("val")
        assert not (isinstance(value, Tensor) and value.is_complex()), f"{node} is complex"
    for shape in ((2, DIM, 4, 6), (3, DIM, 3, 5), (5, DIM, 9, 7)):
        x = torch.randn(shape)
        same(program.module()(x), model(x), atol=1e-5)


# ---------------------------------------------------------------- composition, grouped queries


@every
def test_sums_do_what_their_parts_do(name: str, axes: int):
    positions = grid(axes)
    total = build(f"ape_sincos+{name}", axes)
    first, second = total
    x = tokens(positions)
    for layer in range(total.depth):
        same(total.embed(x, positions, layer), second.embed(first.embed(x, positions, layer), positions, layer))
    q, k = torch.randn(2, 3, HEADS, positions.num_tokens, DIM // HEADS)
    for layer in range(total.depth):
        alone = second(positions, x, layer=layer) if second.content_dependent else second(positions).layer(layer)
        both = total(positions, x, layer=layer) if total.content_dependent else total(positions).layer(layer)
        same(mmpe.attend(q, k, k, both), mmpe.attend(q, k, k, alone), atol=1e-6)
        same(both.inputs(x), alone.inputs(x))
    assert total.state_dict().keys() == {f"parts.1.{key}" for key in second.state_dict()}


@every
def test_grouped_queries_equal_repeated_keys(name: str, axes: int):
    # Frequencies of their own for each query head leave the keys of a group without a common angle.
    shared = {"share_heads": True} if "share_heads" in option_names(encoding_class(name)) else {}
    enc, positions = build(name, axes, **shared), grid(axes)
    x, count = tokens(positions), positions.num_tokens
    q = torch.randn(3, HEADS, count, DIM // HEADS)
    k, v = torch.randn(2, 3, HEADS // 2, count, DIM // HEADS)
    terms = enc(positions, x, layer=1) if enc.content_dependent else enc(positions).layer(1)
    repeated = (t.repeat_interleave(2, dim=1) for t in (k, v))
    same(mmpe.attend(q, k, v, terms), mmpe.attend(q, *repeated, terms), atol=1e-5)


# ---------------------------------------------------------------- errors, words


@every
def test_other_axes_are_refused(name: str, axes: int):
    enc, other = build(name, axes), axes % 3 + 1
    positions = grid(other)
    with pytest.raises(ValueError, match=f"axes={axes}.*create it with axes={other}"):
        probe(enc, positions)


STATED = {
    "none", "ape_learned", "ape_sincos", "rope", "rope_axial", "rope_mixed", "cpe", "pape", "pape_ri", "alibi_2d",
}  # fmt: skip
STATED_CASES = [case for case in CASES if case[0] in STATED]
every_stated = pytest.mark.parametrize(
    ("name", "axes"), STATED_CASES, ids=[f"{name}-{axes}d" for name, axes in STATED_CASES]
)


def whole(enc: mmpe.PositionEncoding, positions: mmpe.Positions, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """One block as a backbone runs it: token term, then attention."""
    x = enc.embed(x, positions, layer=0)
    terms = enc(positions, x, layer=0) if enc.content_dependent else enc(positions).layer(0)
    v = k.expand(-1, k.shape[1], -1, -1)
    return mmpe.attend(q, k, v, terms, backend="sdpa")


def wrong_tokens(axes: int, prefix: int) -> list[Tensor]:
    """Tokens that do not fit the small grid with this prefix: one less, one more, only one, another width, no batch."""
    count = mmpe.Positions.of_size(GRIDS[axes], prefix=prefix).num_tokens
    shapes = [(2, count - 1, DIM), (2, count + 1, DIM), (2, 1, DIM), (2, count, DIM - 1), (2, count, 1), (count, DIM)]
    return [torch.randn(shape) for shape in shapes]


@every_stated
@pytest.mark.parametrize("prefix", [0, 1])
def test_tokens_without_a_position_are_refused(name: str, axes: int, prefix: int):
    """Fault: 196 positions meet 197 tokens, or the position of one token is broadcast over all of them."""
    enc = build(name, axes)
    for x in wrong_tokens(axes, prefix):
        with pytest.raises(ValueError, match="needs x of shape"):
            enc.embed(x, grid(axes, prefix), layer=0)
    positions = grid(axes, 0, (1,) * axes)
    with pytest.raises(ValueError, match="needs x of shape"):
        enc.embed(torch.randn(2, 12, DIM), positions, layer=0)
    with pytest.raises(TypeError, match="floating-point"):
        enc.embed(torch.ones(2, 1, DIM, dtype=torch.long), positions, layer=0)
    with pytest.raises(TypeError, match="needs mmpe.Positions, got Tensor"):
        enc.embed(torch.randn(2, 1, DIM), positions.coords, layer=0)


@every_stated
def test_positions_of_another_batch_are_refused(name: str, axes: int):
    enc, positions = build(name, axes), loose(grid(axes), batch=3)
    for batch in (1, 2):
        x = tokens(positions, batch)
        with pytest.raises(ValueError, match="positions of 3 samples|fill a grid"):
            enc.embed(x, positions, layer=0)


@every_stated
@pytest.mark.parametrize(("queries", "keys"), [(-1, -1), (1, 1), (0, 1), (0, -1), (None, 0), (0, None)])
def test_queries_and_keys_without_a_position_are_refused(name: str, axes: int, queries: int | None, keys: int | None):
    """Fault: attention runs with terms for another number of tokens. Offsets from their number; None is one token."""
    enc, positions = build(name, axes), grid(axes)
    if not set(encoding_class(name).terms) & {"queries_keys", "bias"}:
        return
    count, x = positions.num_tokens, tokens(positions, 2)
    q, k = (torch.randn(2, HEADS, 1 if n is None else count + n, DIM // HEADS) for n in (queries, keys))
    with pytest.raises(ValueError, match="tokens"):
        whole(enc, positions, x, q, k)
    with pytest.raises(ValueError, match="tokens"):
        whole(enc, grid(axes, 0, (1,) * axes), x[:, :1], q, k)


@named
def test_unsupported_axes_are_refused_at_construction(name: str):
    for axes in {0, 1, 2, 3, 4} - set(encoding_class(name).supported_axes):
        with pytest.raises(ValueError, match="supports axes"):
            mmpe.create_encoding(name, dim=DIM, heads=HEADS, axes=axes)


@named
def test_unknown_options_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} has no option 'bogus_option'"):
        mmpe.create_encoding(name, dim=DIM, heads=HEADS, axes=encoding_class(name).supported_axes[0], bogus_option=1)


@named
@pytest.mark.parametrize(("dim", "heads"), [(192, 3), (384, 6), (768, 12), (1024, 16)])
def test_defaults_fit_the_usual_widths(name: str, dim: int, heads: int):
    enc = mmpe.create_encoding(name, dim=dim, heads=heads, axes=max(set(encoding_class(name).supported_axes) & {1, 2}))
    assert (enc.dim, enc.heads, enc.head_dim) == (dim, heads, 64)


@named
def test_describes_itself(name: str):
    """Fault: readers cannot tell which formula or pairing a name stands for (rope-vit#3, nanochat#264)."""
    info, cls = mmpe.describe(name), encoding_class(name)
    assert info.kind in KINDS
    assert "arXiv" in info.source
    assert info.equation
    assert info.cost
    assert info.parity in ("official", "formula")
    assert 20 < len(info.summary) < 200
    assert set(info.axes) <= {1, 2, 3}
    undocumented = [option.name for option in info.options if not option.help]
    assert not undocumented, f"the docstring of {cls.__name__} says nothing of {undocumented}"
    assert [option.name for option in info.options] == list(option_names(cls))
    assert all(line in str(info) for line in (name, info.source, *info.promises))
