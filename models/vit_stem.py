"""The stem of the vision transformer: patches of images, tubelets of clips, and which sizes it takes."""

from __future__ import annotations

from typing import TypeAlias

import torch.nn.functional as F
from timm.layers import PatchEmbed, resample_patch_embed, to_2tuple
from torch import Tensor, nn


class TubeletEmbed(nn.Module):
    """Clips (B, C, T, H, W) -> tokens (B, t, h, w, D): one linear map of each block of frames x rows x columns.

    Tubelets are ViViT's (arXiv 2103.15691). The attributes are those of timm's PatchEmbed.

    Args:
        img_size: (height, width) of the training clips.
        patch_size: (height, width) of a tubelet.
        num_frames: frames of the training clips.
        tubelet_size: frames of a tubelet.
        in_chans: channels of a frame.
        embed_dim: width of a token, D.
        bias: add a learned vector.
        dynamic_img_pad: pad frames at the bottom and right to whole patches. Time is never padded.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        num_frames: int,
        tubelet_size: int,
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
        dynamic_img_pad: bool = False,
    ) -> None:
        super().__init__()
        if num_frames < 1 or tubelet_size < 1:
            raise ValueError(f"num_frames={num_frames} and tubelet_size={tubelet_size} must be 1 or more")
        self.img_size, self.patch_size = img_size, patch_size
        self.num_frames, self.tubelet_size = num_frames, tubelet_size
        self.dynamic_img_pad = dynamic_img_pad
        kernel = (tubelet_size, *patch_size)
        self.proj = nn.Conv3d(in_chans, embed_dim, kernel_size=kernel, stride=kernel, bias=bias)

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels of a frame to a token, the larger side."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        """Grid (t, h, w) of tubelets of a clip of T x H x W."""
        frames, *sides = size
        up = self.dynamic_img_pad
        rows, columns = (-(-s // p) if up else s // p for s, p in zip(sides, self.patch_size, strict=True))
        return frames // self.tubelet_size, rows, columns

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        num_frames: int | None = None,
    ) -> None:
        """Take another size as the own one, resampling the kernel to another patch size."""
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            self.patch_size = to_2tuple(patch_size)
            old, kernel = self.proj, (self.tubelet_size, *self.patch_size)
            self.proj = nn.Conv3d(
                old.in_channels, old.out_channels, kernel, kernel, bias=old.bias is not None,
                device=old.weight.device, dtype=old.weight.dtype,
            )  # fmt: skip
            self.proj.load_state_dict({**old.state_dict(), "weight": self.fitted(old.weight.detach())})
        self.img_size = self.img_size if img_size is None else to_2tuple(img_size)
        self.num_frames = self.num_frames if num_frames is None else num_frames

    def fitted(self, kernel: Tensor) -> Tensor:
        """A kernel (D, C, t, h, w) of another patch size, or (D, C, h, w) of images, in the size of this stem.

        The kernel of images is shared out evenly over the frames, so a clip that stands still gives its image's tokens.
        """
        if kernel.dim() == 4:
            kernel = kernel.unsqueeze(2).expand(-1, -1, self.tubelet_size, -1, -1) / self.tubelet_size
        if tuple(kernel.shape[-2:]) == tuple(self.patch_size):
            return kernel.contiguous()
        flat = resample_patch_embed(kernel.flatten(1, 2), list(self.patch_size))  # (D, C t, h, w)
        return flat.unflatten(1, kernel.shape[1:3])

    def forward(self, x: Tensor) -> Tensor:
        """Clips (B, C, T, H, W) -> tokens (B, t, h, w, D)."""
        if self.dynamic_img_pad:
            rows, columns = ((p - s % p) % p for s, p in zip(x.shape[-2:], self.patch_size, strict=True))
            x = F.pad(x, (0, columns, 0, rows))
        return self.proj(x).permute(0, 2, 3, 4, 1)


Stem: TypeAlias = PatchEmbed | TubeletEmbed


def make_stem(
    img_size: tuple[int, int],
    patch_size: tuple[int, int],
    num_frames: int | None,
    tubelet_size: int,
    in_chans: int,
    embed_dim: int,
    bias: bool,
    dynamic_img_pad: bool,
) -> Stem:
    """The stem of images, or of clips where a number of frames is given."""
    if num_frames is not None:
        return TubeletEmbed(img_size, patch_size, num_frames, tubelet_size, in_chans, embed_dim, bias, dynamic_img_pad)
    return PatchEmbed(
        img_size, patch_size, in_chans, embed_dim,
        output_fmt="NHWC", strict_img_size=False, dynamic_img_pad=dynamic_img_pad, bias=bias,
    )  # fmt: skip


def own_size(stem: Stem) -> tuple[int, ...]:
    """(H, W) of the stem's images, or (T, H, W) of its clips."""
    return (stem.num_frames, *stem.img_size) if isinstance(stem, TubeletEmbed) else tuple(stem.img_size)


def check_size(stem: Stem, size: tuple[int, ...], dynamic: bool) -> None:
    """Refuse images (H, W) or clips (T, H, W) of a size that the stem does not take.

    Args:
        stem: of images or of clips.
        size: of the images or clips.
        dynamic: whether other sizes than the own one are taken.
    """
    what, name = ("clip", "tubelet") if isinstance(stem, TubeletEmbed) else ("image", "patch")
    if not dynamic and tuple(size) != own_size(stem):
        raise ValueError(
            f"{what} {_by(size)} is not {_by(own_size(stem))}; build with dynamic_img_size=True or call set_input_size"
        )
    step = (stem.tubelet_size, *stem.patch_size) if isinstance(stem, TubeletEmbed) else tuple(stem.patch_size)
    padded = 2 if stem.dynamic_img_pad else 0
    sides = list(zip(size, step, strict=True))[: len(size) - padded]
    if any(side < part for side, part in sides):
        raise ValueError(
            f"{what} {_by(size)} is smaller than a {name} of {_by(step)}; resize it or use dynamic_img_pad=True"
        )
    if any(side % part for side, part in sides):
        near = tuple(side - side % part for side, part in zip(size, step, strict=True))
        raise ValueError(
            f"{what} {_by(size)} is no multiple of the {name} {_by(step)}; use {_by(near)} or dynamic_img_pad=True"
        )


def _by(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))
