"""Checkpoints of the vision transformer: what fits, what is resampled, and errors that say what does not fit."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import resample_patch_embed
from torch import Tensor, nn

from mmpe.integrations.backbone import create_for_grid

from .conversion import from_timm_names, looks_like_timm
from .vit_stem import TubeletEmbed

if TYPE_CHECKING:
    from .vit import VisionTransformer

# Tables that other code bases store but anybody can compute: foreign checkpoints bring them, models must not want them.
_DERIVED = re.compile(
    r"(^|\.)(freqs_cis|freqs_cos|freqs_sin|freqs_t_[xy]|inv_freq|rope\.(?!freqs$).*|periods|relative_position_index)$"
)
_WRAPPERS = ("model_ema", "model", "module", "state_dict")


def register_hooks(model: VisionTransformer) -> None:
    """Make the model write its encoding into the metadata of its state dict, and compare when it loads one."""
    model.register_state_dict_post_hook(_sign)
    model.register_load_state_dict_pre_hook(_explain)


def _sign(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata["encoding"] = model.encoding_name


def _explain(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    *_: list[str],
) -> None:
    # Inside of a module that loads, torch does not tell whether it is strict. Among the missing keys the explanation
    # becomes part of the error if it is, and is only reported if it is not.
    weights = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    problem = mismatch(model, weights, local_metadata.get("encoding"))
    if problem is not None:
        missing_keys.append(f"{prefix}encoding ({problem})")


def mismatch(model: nn.Module, weights: Mapping[str, Any], encoding: str | None = None) -> str | None:
    """Why a checkpoint does not belong to this model; None if it may.

    Args:
        model: the model that would load it.
        weights: names and tensors.
        encoding: name of the encoding that the checkpoint was made with, if known.
    """
    if encoding not in (None, model.encoding_name):
        return (
            f"the checkpoint was made with encoding={encoding!r}, this model has encoding={model.encoding_name!r}; "
            f"build it with encoding={encoding!r}, or load with strict=False"
        )
    if not weights:
        return None
    return _other_depth(weights, len(model.blocks)) or _other_encoding(weights, model)  # type: ignore[arg-type]


def _other_depth(state_dict: Mapping[str, Any], depth: int) -> str | None:
    indices = {int(match[1]) for key in state_dict if (match := re.match(r"blocks\.(\d+)\.", key))}
    if indices and max(indices) + 1 != depth:
        found = max(indices) + 1
        return f"the checkpoint has {found} blocks, this model depth={depth}; build it with depth={found}"
    return None


def _other_encoding(state_dict: Mapping[str, Any], model: nn.Module) -> str | None:
    encoding: nn.Module = model.encoding  # type: ignore[assignment]
    there = {key.removeprefix("encoding.") for key in state_dict if key.startswith("encoding.")}
    missing = {name for name, _ in encoding.named_parameters()} - there
    unknown = there - set(encoding.state_dict())
    if not missing and not unknown:
        return None
    return (
        f"the checkpoint is of another position encoding than this model's encoding={model.encoding_name!r}: "
        f"it lacks {sorted(missing) or 'nothing'} and brings {sorted(unknown) or 'nothing'} under 'encoding.'; "
        f"build the model with the encoding of the checkpoint, or load with strict=False"
    )


def read_state_dict(path: Path, map_location: str = "cpu") -> dict[str, Any]:
    """Contents of a .safetensors file, of a torch file, or of a folder of `save_pretrained`."""
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}; give a .safetensors or torch file, or a saved folder")
    if path.suffix == ".safetensors":
        return read_safetensors(path, map_location)
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) cannot be read as weights, is it whole? {error}") from error


def read_safetensors(path: Path, map_location: str = "cpu") -> dict[str, Tensor]:
    """The weights in a .safetensors file; a torn one is an error that names it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=map_location)
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({path.stat().st_size} bytes): {error}") from error


def load_pretrained(model: VisionTransformer, path: Path, strict: bool) -> None:
    """Load a checkpoint of ours or of timm into the model, resampled to its grid and patch size."""
    model.load_state_dict(checkpoint_filter_fn(read_state_dict(path), model), strict=strict)


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A checkpoint in the names and sizes of the model.

    Unwraps trainers' dictionaries, drops derived rotary tables, takes timm's names, and resamples the patch kernel.
    Position tables are resampled by the encoding itself when it loads them.

    Args:
        state_dict: of this class or of a timm ViT.
        model: the model that will load the result.
    """
    for key in _WRAPPERS:
        if isinstance(state_dict.get(key), Mapping):
            state_dict = state_dict[key]
    state_dict = _without_prefix(state_dict)
    weights = {key: value for key, value in state_dict.items() if not _DERIVED.search(key)}
    if looks_like_timm(weights):
        weights = from_timm_names(weights, model.encoding)  # type: ignore[arg-type]
    kernel, stem = weights.get("patch_embed.proj.weight"), model.patch_embed
    size = list(stem.patch_size)  # type: ignore[union-attr, arg-type]
    if isinstance(kernel, Tensor) and isinstance(stem, TubeletEmbed):
        weights["patch_embed.proj.weight"] = stem.fitted(kernel)
    elif isinstance(kernel, Tensor) and kernel.dim() == 4 and list(kernel.shape[-2:]) != size:
        weights["patch_embed.proj.weight"] = resample_patch_embed(kernel, size)
    return weights


def _without_prefix(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Strip what Lightning ("model."), compiled ("_orig_mod.") and distributed ("module.") modules put before names."""
    while state_dict and "patch_embed.proj.weight" not in state_dict:
        inner = {
            key.split(".", 1)[1]: value
            for key, value in state_dict.items()
            if key.startswith(("model.", "_orig_mod.", "module."))
        }
        if not inner:
            break
        state_dict = inner
    return state_dict


def set_input_size(
    model: VisionTransformer,
    img_size: int | tuple[int, int] | None,
    patch_size: int | tuple[int, int] | None,
    num_frames: int | None,
) -> None:
    """Another size of images, patches or clips for the model: kernel and position tables are resampled."""
    stem = model.patch_embed
    if isinstance(stem, TubeletEmbed):
        stem.set_input_size(img_size, patch_size, num_frames)
        model.num_frames = stem.num_frames
        model._record(num_frames=stem.num_frames)
    elif num_frames is not None:
        raise ValueError(f"num_frames={num_frames} is for models of clips; build this one with num_frames")
    else:
        stem.set_input_size(img_size, patch_size)
    model._record(img_size=tuple(stem.img_size), patch_size=tuple(stem.patch_size), trained_grid=model.trained_grid)
    traits = getattr(model, "_traits", None)  # where newer versions of timm keep the size of a model that they built
    if isinstance(traits, dict):
        model.__dict__["_traits"] = {**traits, "img_size": tuple(stem.img_size)}
    config = model.config
    prefix = 0 if config.get("no_embed_class") else model.num_prefix_tokens
    old = model.encoding
    new = create_for_grid(
        model.encoding_name, model.embed_dim, old.heads, model.depth, model.grid_size, prefix,
        config.get("encoding_options"),
    )  # fmt: skip
    new.load_state_dict(old.state_dict())
    weight = stem.proj.weight
    model.encoding = new.to(weight.device, weight.dtype).requires_grad_(_is_trained(old)).train(model.training)


def _is_trained(encoding: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in encoding.parameters()) or not list(encoding.parameters())
