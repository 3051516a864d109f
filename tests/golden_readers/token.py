"""Encodings that act on tokens: learned Fourier features, LaPE, LOOPE's patch order, SeqPE."""

import torch
import torch.nn.functional as F
from torch import Tensor

import mmpe
from golden_readers import Arrays, Comparison, reader
from mmpe.encodings.fourier import fourier_features, learned_fourier
from mmpe.encodings.loope import curve_rank, gilbert_path
from mmpe.encodings.seqpe import DigitTransformer, SeqPETerms, leading_zeros
from mmpe.encodings.seqpe_losses import contrastive_loss, digits_of, transfer_loss

ATOL = 1e-5


def tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.as_tensor(array) for name, array in arrays.items()}


@reader("lff")
def read_lff(stem: str, arrays: Arrays) -> list[Comparison]:
    """x (N, G, M); Wr, w1, b1, w2, b2 -> fourier (N, G, F), out (N, C); meta = [G, M, F, hidden, C]."""
    groups, m, fourier, hidden, dim = arrays["meta"].tolist()
    t = tensors(arrays)
    weights = t["Wr"], t["w1"], t["b1"], t["w2"], t["b2"]
    found = [
        Comparison("fourier", fourier_features(t["x"], t["Wr"]), arrays["fourier"], ATOL),
        Comparison("out", learned_fourier(t["x"], *weights), arrays["out"], ATOL),
    ]
    if groups * m <= 3:
        enc = mmpe.create_encoding(
            "fourier_learned", dim, 1, axes=groups * m, groups=groups, fourier_dim=fourier, hidden_dim=hidden
        )
        names = ("frequencies", "weight1", "bias1", "weight2", "bias2")
        enc.load_state_dict(dict(zip(names, weights, strict=True)))
        positions = mmpe.Positions.points(t["x"].flatten(1), prefix=1)
        out = enc.embed(torch.zeros(1, positions.num_tokens, dim), positions)[0]
        found.append(Comparison("module", out[1:], arrays["out"], ATOL))
    return found


@reader("lape")
def read_lape(stem: str, arrays: Arrays) -> list[Comparison]:
    """b{l}_* parameters of block l; x, pos_embed -> x_after_l, pe_layer_l; meta = [C, H, N, depth]."""
    dim, heads, count, depth = arrays["meta"].tolist()
    t, eps = tensors(arrays), float(arrays["eps"])
    enc = mmpe.create_encoding(
        "lape", dim, heads, axes=1, depth=depth, eps=eps, grid_size=count - 1, prefix=1
    )
    norms = {key: torch.stack([t[f"b{i}_pe_norm__{key}"] for i in range(depth)]) for key in ("weight", "bias")}
    enc.load_state_dict(norms | {"base.table": t["pos_embed"]}, strict=False)
    positions = mmpe.Positions.line(count - 1, prefix=1)
    terms, x, found = enc(positions), t["x"], []
    for i in range(depth):
        block = {name.removeprefix(f"b{i}_"): value for name, value in t.items() if name.startswith(f"b{i}_")}
        x = _lape_block(x, block, terms.layer(i), heads, eps)
        added = terms.layer(i).inputs(torch.zeros(1, count, dim))
        found += [Comparison(f"x_after_{i}", x, arrays[f"x_after_{i}"], ATOL)]
        found += [Comparison(f"pe_layer_{i}", added, arrays[f"pe_layer_{i}"], ATOL)]
    return found


def _lape_block(
    x: Tensor, block: dict[str, Tensor], terms: mmpe.AttentionTerms, heads: int, eps: float
) -> Tensor:
    dim = x.shape[-1]

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, block[f"{name}__weight"], block.get(f"{name}__bias"))

    h = terms.inputs(F.layer_norm(x, (dim,), block["norm1__weight"], block["norm1__bias"], eps))
    q, k, v = linear("attn__qkv", h).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    x = x + linear("attn__proj", mmpe.attend(q, k, v, terms).transpose(1, 2).flatten(2))
    h = F.layer_norm(x, (dim,), block["norm2__weight"], block["norm2__bias"], eps)
    return x + linear("mlp__fc2", F.gelu(linear("mlp__fc1", h)))


@reader("loope__gilbert")
def read_gilbert(stem: str, arrays: Arrays) -> list[Comparison]:
    """path_xy (N, 2): cells (column, row) as the curve visits them; rank (h, w)."""
    h, w = arrays["rank"].shape
    return [
        Comparison("rank", curve_rank((h, w)).reshape(h, w), torch.as_tensor(arrays["rank"]).float(), 0.0),
        Comparison("path", gilbert_path(h, w).flip(-1), arrays["path_xy"], 0.0),
    ]


@reader("seqpe")
def read_digit_transformer(stem: str, arrays: Arrays) -> list[Comparison]:
    """Positions -> digits, pad_mask (1 = a digit that counts), y; p_* are the official parameters.

    meta = [P, heads, layers, max_digits, axes, bidirectional, mask_padding, last_layernorm].
    """
    dim, heads, layers, max_digits, axes, bidirectional, mask_padding, norm = arrays["meta"].tolist()
    t = tensors(arrays)
    net = DigitTransformer(
        arrays["y"].shape[-1], axes, max_digits, dim, heads, layers, bool(bidirectional), bool(mask_padding), bool(norm)
    )
    net.load_state_dict(_digit_weights(t, layers))
    digits = digits_of(t["positions"].reshape(-1, axes), max_digits)
    return [
        Comparison("digits", digits, arrays["digits"], 0.0),
        Comparison("pad_mask", (~leading_zeros(digits, max_digits)).float(), arrays["pad_mask"], 0.0),
        Comparison("y", net(digits), arrays["y"], ATOL),
    ]


def _digit_weights(t: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Official names and (in, out) weights to ours."""
    ours = {"attn__c_attn": "qkv", "attn__c_proj": "proj", "mlp__c_fc": "fc1", "mlp__c_proj": "fc2"}
    found = {
        "token": t["p_token_of_seqpe_embed__weight"],
        "place": t["p_pos_of_seqpe_embed__weight"],
        "cls": t["p_cls_token_embed"].flatten(),
        "out.weight": t["p_out_proj__weight"],
        "out.bias": t["p_out_proj__bias"],
    }
    if "p_dim_token_embed" in t:
        found["axis"] = t["p_dim_token_embed"].flatten(1)
    if "p_layernorm__weight" in t:
        found |= {"norm.weight": t["p_layernorm__weight"], "norm.bias": t["p_layernorm__bias"]}
    for i in range(layers):
        for official, own in ours.items():
            found[f"blocks.{i}.{own}.weight"] = t[f"p_transformers__{i}__{official}__weight"].T
            found[f"blocks.{i}.{own}.bias"] = t[f"p_transformers__{i}__{official}__bias"]
        for n in (1, 2):
            for kind in ("weight", "bias"):
                found[f"blocks.{i}.norm{n}.{kind}"] = t[f"p_transformers__{i}__layernorm_{n}__{kind}"]
    return found


@reader("seqpe__attn")
def read_attention(stem: str, arrays: Arrays) -> list[Comparison]:
    """x, pe (B, N, C) -> y; p_pe_qk (both from pe), p_qkv, p_proj; meta = [C, H, multihead]; the name has the mode."""
    t, heads = tensors(arrays), int(arrays["meta"][1])
    mode = next(mode for mode in ("attn_mul", "attn_add", "attn_scalar") if mode in stem)

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, t[f"p_{name}__weight"], t.get(f"p_{name}__bias"))

    q, k, v = linear("qkv", t["x"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    pe_q, pe_k = linear("pe_qk", t["pe"]).unflatten(-1, (2, -1, q.shape[-1])).permute(2, 0, 3, 1, 4).unbind(0)
    o = mmpe.attend(q, k, v, SeqPETerms(mode, pe_q, pe_k))
    return [Comparison("y", linear("proj", o.transpose(1, 2).flatten(2)), arrays["y"], ATOL)]


@reader("seqpe__losses")
def read_losses(stem: str, arrays: Arrays) -> list[Comparison]:
    """Contrastive of pivot, neg, labels; transfer of main_pe[main_indices] and trans_pe; meta = [windows, heads]."""
    t, (windows, heads) = tensors(arrays), arrays["meta"].tolist()
    pivot = t["pivot"]
    candidates = t["neg"].reshape(len(pivot), -1, pivot.shape[-1])
    inside = t["main_pe"][0][t["main_indices"]].unflatten(0, (windows, -1))
    shifted = t["trans_pe"].unflatten(0, (windows, -1))
    found = {
        "contrastive": contrastive_loss(pivot, candidates, t["labels"]),
        "transfer_multihead_beta1": transfer_loss(inside, shifted, heads),
        "transfer_single_beta08": transfer_loss(inside, shifted, beta=0.8),
    }
    return [Comparison(name, ours, arrays[name], ATOL) for name, ours in found.items() if name in arrays]
