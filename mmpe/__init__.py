"""mmpe: position encodings for vision, video and multimodal transformers.

    >>> import torch, mmpe
    >>> enc = mmpe.create_encoding("rope_axial", dim=64, heads=4, axes=2)
    >>> pos = mmpe.Positions.grid(8, 8, prefix=1)
    >>> q = k = v = torch.randn(2, 4, 65, 16)
    >>> mmpe.attend(q, k, v, enc(pos)).shape
    torch.Size([2, 4, 65, 16])
"""

from .attention import attend
from .encoding import AttentionTerms, PositionEncoding
from .integrations._timm_hook import register_with_timm as _register_with_timm
from .positions import Positions
from .registry import EncodingInfo, create_encoding, describe, list_encodings, register_encoding

__version__ = "0.1.0"

__all__ = [
    "AttentionTerms",
    "EncodingInfo",
    "PositionEncoding",
    "Positions",
    "attend",
    "create_encoding",
    "describe",
    "list_encodings",
    "register_encoding",
]

_register_with_timm()  # timm.create_model finds our models, whichever of the two is imported first
