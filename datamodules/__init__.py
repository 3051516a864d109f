"""LightningDataModules, imported as `mmpe.datamodules` (see docs/architecture.md)."""

from .digits import Digits
from .image_folder import ImageFolder, ImageTransforms
from .image_shards import ImageShards
from .partner import PartnerGrids
from .shard_writer import make_shards

__all__ = ["Digits", "ImageFolder", "ImageShards", "ImageTransforms", "PartnerGrids", "make_shards"]
