"""Models of vLLM's registry whose modules pick a class of attention layer or backend themselves, and their drafts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

# Package of a model: module here that serves it
PACKAGES = {"vllm.models.deepseek_v4": "deepseek_v4", "vllm.models.deepseek_v41": "deepseek_v4", "vllm.models.dots3_note": "dots3"}


@dataclass(frozen=True)
class _Model(_LazyRegisteredModel):
    """A model that is not imported yet. Names in its module are replaced when its class is loaded."""

    def load_model_cls(self) -> Any:
        found = super().load_model_cls()
        import_module(f"{__package__}.{PACKAGES[self.module_name]}").serve(self.module_name)
        return found


def register() -> None:
    """Replace the registry's entries of these packages, without importing them. A second call does nothing."""
    for name, model in list(ModelRegistry.models.items()):
        if type(model) is _LazyRegisteredModel and model.module_name in PACKAGES:
            ModelRegistry.models[name] = _Model(model.module_name, model.class_name)
