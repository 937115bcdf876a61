"""Learned KV-cache compression: retrofit, export, serve, compare.

A name is imported when it is first used, so that a command line is read without PyTorch. As soon as transformers is
imported, before this package or after it, its Auto* classes know the compressed families.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmc.models import load_model, retrofit
    from dmc.runtime import Engine, SamplingParams
else:

    def __getattr__(name: str) -> Any:
        if name in ("models", "policies", "runtime"):
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


__version__ = "0.1.0"

__all__ = ["Engine", "SamplingParams", "__version__", "load_model", "retrofit"]

_HOMES = {
    "Engine": "dmc.runtime",
    "SamplingParams": "dmc.runtime",
    "load_model": "dmc.models",
    "retrofit": "dmc.models",
}


def _give_models_their_cache() -> None:
    """Let `generate` of compressed models use the runtime's cache: models never import the runtime."""
    from dmc.models import CompressedCausalLM

    def paged_cache(model: Any) -> Any:
        from dmc.runtime import PagedGenerationCache

        return PagedGenerationCache(model)

    CompressedCausalLM.cache_factory = paged_cache


_AFTER: dict[str, Callable[[], Any]] = {
    "transformers": lambda: importlib.import_module("dmc.models"),  # which registers the families
    "dmc.models": _give_models_their_cache,
}
"""What happens once a module has been imported."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `_AFTER` where the other finders do, and lets what follows them follow."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AFTER:
            return None
        for finder in sys.meta_path:
            find_spec = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, _AFTER[fullname])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes a module with its own loader, which then takes this one's place."""

    def __init__(self, loader: Any, then: Callable[[], Any]) -> None:
        self.loader = loader
        self.then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.then()


sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != __name__]  # when it is reloaded
sys.meta_path.insert(0, _Finder())
if "transformers" in sys.modules:
    importlib.import_module("dmc.models")
