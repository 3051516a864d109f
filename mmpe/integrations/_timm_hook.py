"""Enters the backbones of mmpe into timm's registry as soon as both libraries are loaded, in either order.

timm knows no entry points for plug-ins, and the core of mmpe must not import timm. So `import mmpe` leaves a finder
that waits for timm: it loads timm as usual and registers our models right after. If timm is there already, they are
registered at once. The finder answers for no other module and goes away when its work is done.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# By name, since the library imports no backbone: this one string is the plug-in.
_MODELS = "mmpe.models.vit_presets"


def register_with_timm() -> None:
    """Register the `mmpe_vit_*` models now if timm is loaded, else once it is; a second call changes nothing."""
    timm = sys.modules.get("timm")
    if timm is not None and not _is_loading(timm):
        importlib.import_module(_MODELS)
    elif not any(isinstance(finder, _WaitForTimm) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForTimm())


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _WaitForTimm:
    """A finder that lets the other finders find timm and registers our models after its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm":
            return None
        spec = next(filter(None, (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)), None)
        if spec is not None and spec.loader is not None:
            self._register_after(spec)
        return spec

    def _register_after(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = loader.exec_module  # type: ignore[union-attr]

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(_MODELS)

        # On this one loader object, which serves timm alone; asking for the spec without importing stays harmless.
        loader.exec_module = execute_and_register  # type: ignore[union-attr, method-assign]
