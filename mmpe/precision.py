"""Where half precision must not reach: angles, exponentials, bias networks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast does not lower products on the device of x."""
    known = torch.amp.is_autocast_available(x.device.type)  # not so for the meta device
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()
