"""LightningDataModules, imported as `mmpe.datamodules` (see docs/architecture.md)."""

from .digits import Digits
from .image_folder import ImageFolder, ImageTransforms
from .image_shards import ImageShards
from .motion_clips import MotionClips
from .partner import PartnerGrids
from .shard_writer import make_shards
from .video_folder import VideoFolder
from .video_reader import VideoError, VideoReader
from .video_transforms import VideoTransforms

__all__ = [
    "Digits",
    "ImageFolder",
    "ImageShards",
    "ImageTransforms",
    "MotionClips",
    "PartnerGrids",
    "VideoError",
    "VideoFolder",
    "VideoReader",
    "VideoTransforms",
    "make_shards",
]
