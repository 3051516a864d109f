"""Backbones and one LightningModule a task; import the module you need, such as `mmpe.models.vit`.

The classes that configs name are found here too (`mmpe.models.ImageClassification`), loaded when first asked for.
"""

from importlib import import_module

_HOMES = {
    "GridLabelling": "grid_labelling",
    "ImageClassification": "image_classification",
    "VideoClassification": "video_classification",
    "VisionTransformer": "vit",
}

__all__ = ["GridLabelling", "ImageClassification", "VideoClassification", "VisionTransformer"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"mmpe.models has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
