"""Arguments of our vision transformer read from a timm model, and timm's arguments for one of ours."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from timm.layers import GluMlp, Mlp, SwiGLU, SwiGLUPacked, get_act_layer, get_norm_layer
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn

from mmpe.encoding import PositionEncoding, SumEncoding

if TYPE_CHECKING:
    from .vit import VisionTransformer

_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu", "ReLU": "relu"}
_NORMS = {"LayerNorm": "layernorm", "RmsNorm": "rmsnorm", "SimpleNorm": "simplenorm"}
_SIZES = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}


def read(model: Any) -> dict[str, Any]:
    """Arguments of our `VisionTransformer` for a timm VisionTransformer or Eva.

    Raises:
        ValueError: for another class, or parts that our model does not have.
    """
    _refuse_foreign(model)
    stem = model.patch_embed
    arguments = {
        "img_size": tuple(stem.img_size),
        "patch_size": tuple(stem.patch_size),
        "in_chans": stem.proj.in_channels,
        "dynamic_img_pad": stem.dynamic_img_pad,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "class_token": model.cls_token is not None,
        "reg_tokens": 0 if model.reg_token is None else model.reg_token.shape[1],
        "no_embed_class": model.no_embed_class,
        "pre_norm": _present(model.norm_pre),
        "fc_norm": _present(model.fc_norm),
    }
    name, options = _read_encoding(model)
    return arguments | _read_block(model) | {"encoding": name, "encoding_options": options}


def _refuse_foreign(model: Any) -> None:
    kinds: dict[type, type] = {TimmViT: Block, Eva: EvaBlock}
    block_class = kinds.get(type(model))
    if block_class is None:
        raise ValueError(f"cannot convert {type(model).__name__}; timm's VisionTransformer and Eva can be converted")
    block: Any = model.blocks[0]
    found_class: type = type(block)
    if found_class is not block_class:
        raise ValueError(f"cannot convert blocks of class {found_class.__name__}, only {block_class.__name__}")
    attention = block.attn
    faults = {
        "gated attention": getattr(attention, "gate", None) is not None,
        "grouped keys": getattr(attention, "num_kv_heads", attention.num_heads) != attention.num_heads,
        "heads of another width": attention.head_dim * attention.num_heads != model.embed_dim,
        "LayerScale on attention alone": getattr(block, "gamma_1", None) is not None and block.gamma_2 is None,
        "attention without an output bias": attention.proj.bias is None,
        "no last norm, or two": _present(model.norm) == _present(model.fc_norm),
        f"pooling {model.global_pool!r}": model.global_pool == "prr" or (
            model.global_pool == "map" and type(model) is Eva and model.num_prefix_tokens > 0
        ),
    }  # fmt: skip
    found = [fault for fault, there in faults.items() if there]
    if found:
        raise ValueError(f"cannot convert this {type(model).__name__}: it has {', '.join(found)}")


def _read_block(model: Any) -> dict[str, Any]:
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    projection = attention.qkv if attention.qkv is not None else attention.q_proj
    scaled = _present(getattr(block, "ls1", nn.Identity())) or getattr(block, "gamma_1", None) is not None
    swiglu, hidden, activation = _read_mlp(mlp)
    return {
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": attention.num_heads,
        "mlp_ratio": hidden / model.embed_dim,
        "swiglu": swiglu,
        "act_layer": activation,
        "qkv_bias": projection.bias is not None or getattr(attention, "q_bias", None) is not None,
        "qk_norm": _present(attention.q_norm),
        "scale_attn_norm": _present(attention.norm),
        "scale_mlp_norm": _present(mlp.norm),
        "init_values": 1e-5 if scaled else None,
        "norm_layer": _named(block.norm1, _NORMS, "norm"),
        "norm_eps": block.norm1.eps,
    }


def _read_mlp(mlp: Any) -> tuple[Any, int, str]:
    """Kind of our MLP, its hidden width and the name of its activation."""
    if type(mlp) is Mlp:
        return False, mlp.fc1.out_features, _named(mlp.act, _ACTIVATIONS, "activation")
    if type(mlp) is SwiGLU:
        return True, mlp.fc1_g.out_features, "gelu"
    if type(mlp) is GluMlp and isinstance(mlp.act, nn.SiLU) and not mlp.gate_last:
        return "packed", mlp.fc1.out_features, "gelu"
    raise ValueError(f"cannot convert an MLP of class {type(mlp).__name__}; Mlp, SwiGLU and its packed form can be")


def _read_encoding(model: Any) -> tuple[str, dict[str, Any]]:
    names: list[str] = []
    options: dict[str, Any] = {}
    if model.pos_embed is not None:
        names.append("ape_learned")
    rope = getattr(model, "rope", None)
    if rope is not None:
        name, options = _read_rope(rope, getattr(model.blocks[0].attn, "rotate_half", False))
        names.append(name)
    return "+".join(names) or "none", options


def _read_rope(rope: Any, half: bool) -> tuple[str, dict[str, Any]]:
    kind = type(rope).__name__
    if kind == "RotaryEmbeddingMixed":
        return "rope_mixed", {"base": rope.temperature, "grid_indexing": rope.grid_indexing, "half": half}
    shared = {"grid_offset": rope.grid_offset, "grid_indexing": rope.grid_indexing, "half": half}
    if kind == "RotaryEmbeddingCat" and not rope.in_pixels and getattr(rope, "grid_type", "index") == "index":
        reference = None if rope.ref_feat_shape is None else tuple(rope.ref_feat_shape)
        return "rope_axial", {"base": float(rope.temperature), "ref_feat_shape": reference, **shared}
    if kind == "RotaryEmbeddingDinoV3":
        periods = {"min_period": rope.min_period, "max_period": rope.max_period}
        periods = periods if None not in periods.values() else {"base": rope.temperature}
        return "rope_axial", {
            "convention": "dinov3", "normalize_coords": rope.normalize_coords, **periods, **shared
        }  # fmt: skip
    raise ValueError(f"cannot convert a rotary encoding of class {kind} with these options")


def write(model: VisionTransformer) -> tuple[str, dict[str, Any]]:
    """Name and keywords in timm for our model.

    Raises:
        ValueError: for an encoding or option that timm does not have.
    """
    parts = list(model.encoding) if isinstance(model.encoding, SumEncoding) else [model.encoding]
    by_name = {part.name: part for part in parts}
    rope = by_name.pop("rope_mixed", None) or by_name.pop("rope_axial", None)
    table = by_name.pop("ape_learned", None)
    by_name.pop("none", None)
    if by_name:
        raise ValueError(f"timm has no {sorted(by_name)}; it has ape_learned, rope_axial, rope_mixed and their sums")
    if model.position_scaling == "scaled" and rope is not None and not _may_stretch(rope):
        raise ValueError("timm cannot stretch the positions of this encoding; use model.set_position_scaling('raw')")
    common = _write_common(model) | _write_norms(model)
    size = _SIZES.get((model.embed_dim, model.depth), "small")
    if rope is None:
        return f"vit_{size}_patch16_224", common | _write_plain(model, table is not None)
    variant = ("_mixed" if rope.name == "rope_mixed" else "") + ("_ape" if table is not None else "")
    size = "small" if size == "tiny" else size  # timm has no tiny rotary model; the keywords set the size anyway
    kwargs = common | _write_eva(model, table is not None) | _write_rope(rope, model)
    return f"vit_{size}_patch16_rope{variant}_224", kwargs


def is_interleaved_only(model: VisionTransformer) -> bool:
    """Whether timm's version of the model's rotary encoding knows one pairing alone."""
    return "rope_mixed" in model.encoding_name


def _may_stretch(rope: Any) -> bool:
    return rope.name == "rope_axial" and rope.convention.spectrum == "lang" and rope.ref_feat_shape is None


def _write_common(model: VisionTransformer) -> dict[str, Any]:
    config = model.config
    same = (
        "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "qkv_bias", "qk_norm",
        "init_values", "class_token", "no_embed_class", "dynamic_img_pad",
    )  # fmt: skip
    kwargs = {key: config[key] for key in same}
    return kwargs | {"img_size": model.patch_embed.img_size, "global_pool": model.global_pool, "dynamic_img_size": True}


def _write_norms(model: VisionTransformer) -> dict[str, Any]:
    config = model.config
    norm = get_norm_layer(config["norm_layer"])
    return {"norm_layer": norm if config["norm_eps"] is None else partial(norm, eps=config["norm_eps"])}


def _write_plain(model: VisionTransformer, table: bool) -> dict[str, Any]:
    config = model.config
    mlp = {False: Mlp, True: SwiGLU, "packed": SwiGLUPacked}[config["swiglu"]]
    return {
        "reg_tokens": config["reg_tokens"],
        "pos_embed": "learn" if table else "none",
        "pre_norm": config["pre_norm"],
        "fc_norm": _present(model.fc_norm),
        "mlp_ratio": _hidden(model) / model.embed_dim,
        "mlp_layer": mlp,
        "act_layer": nn.SiLU if config["swiglu"] else get_act_layer(config["act_layer"]),
        "scale_attn_norm": config["scale_attn_norm"],
        "scale_mlp_norm": config["scale_mlp_norm"],
    }


def _write_eva(model: VisionTransformer, table: bool) -> dict[str, Any]:
    config = model.config
    if config["act_layer"] != "gelu" and not config["swiglu"]:
        raise ValueError(f"timm's rotary models have act_layer='gelu' only, this one {config['act_layer']!r}")
    packed = config["swiglu"] == "packed"
    return {
        "init_values": config["init_values"] or 1.0,  # timm takes None for "not given"; LayerScale of 1 does nothing
        "attn_type": "rope",
        "num_reg_tokens": config["reg_tokens"],
        "use_abs_pos_emb": table,
        "use_rot_pos_emb": True,
        "use_pre_transformer_norm": config["pre_norm"],
        "use_fc_norm": _present(model.fc_norm),
        "mlp_ratio": _hidden(model) / model.embed_dim / (2 if packed else 1),
        "swiglu_mlp": bool(config["swiglu"]),
        "swiglu_align_to": 1 if config["swiglu"] is True else 0,  # any alignment selects the form with two matrices
        "scale_attn_inner": config["scale_attn_norm"],
        "scale_mlp": config["scale_mlp_norm"],
    }


def _hidden(model: VisionTransformer) -> int:
    mlp: Any = model.blocks[0].mlp
    return (mlp.fc1_g if isinstance(mlp, SwiGLU) else mlp.fc1).out_features


def _write_rope(rope: PositionEncoding, model: VisionTransformer) -> dict[str, Any]:
    encoding: Any = rope
    if encoding.name == "rope_mixed":
        if list(encoding.freqs.shape[1:3]) != [model.depth, encoding.heads]:
            raise ValueError("timm's rope_mixed has frequencies for every block and head; share_* has no equivalent")
        return {
            "rope_type": "mixed", "rope_temperature": encoding.base, "rope_grid_indexing": encoding.grid_indexing
        }  # fmt: skip
    c = encoding.convention
    kinds = {("lang", "index"): "cat", ("period", "centered"): "dinov3"}
    kind = kinds.get((c.spectrum, c.coordinate_kind))
    odd = kind is None or c.min_period is not None or len(set(encoding.bases)) > 1 or len(set(encoding.grid_offset)) > 1
    if odd or 2 * sum(encoding.planes) != encoding.head_dim or (kind == "dinov3" and c.normalize_coords != "separate"):
        raise ValueError("timm cannot express these options of rope_axial; those of 'rope-vit' and 'eva02' it can")
    reference = encoding.ref_feat_shape
    if reference is None and model.position_scaling == "scaled":
        reference = model.trained_grid
    return {
        "rope_type": kind,
        "rope_temperature": encoding.bases[0],
        "rope_grid_indexing": c.grid_indexing,
        "rope_grid_offset": encoding.grid_offset[0],
        "rope_rotate_half": encoding.half_pairing,
        "ref_feat_shape": None if reference is None else tuple(int(size) for size in reference),
    }


def _present(module: Any) -> bool:
    return not isinstance(module, nn.Identity)


def _named(module: nn.Module, names: dict[str, str], what: str) -> str:
    name = names.get(type(module).__name__)
    if name is None:
        raise ValueError(f"cannot convert the {what} {type(module).__name__}; known are {', '.join(names)}")
    return name
