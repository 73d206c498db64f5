"""Residual-mass accounting for partial-KV decoding: the method, and a pipeline that reproduces its paper.

`PhiMaps`, `partial_kv`, `partial_generate`, `partial_decoding`, `Text`, `PackedCache`, `pack_weights` and `load_gguf`
are the library's entry points; `residual_mass.core` holds the mathematics and needs only torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residual_mass.decode.backends import backend_for
    from residual_mass.decode.generate import partial_decoding, partial_generate, partial_kv
    from residual_mass.decode.packed_backend import PackedCache
    from residual_mass.decode.text import Text
    from residual_mass.model.loading import load_gguf
    from residual_mass.model.packed_weights import pack_weights
    from residual_mass.model.phi_maps import PhiMaps

__version__ = "0.2.0"
__all__ = [
    "PackedCache",
    "PhiMaps",
    "Text",
    "__version__",
    "backend_for",
    "load_gguf",
    "pack_weights",
    "partial_decoding",
    "partial_generate",
    "partial_kv",
]
ENTRY_POINTS = {
    "PackedCache": "decode.packed_backend",
    "PhiMaps": "model.phi_maps",
    "Text": "decode.text",
    "backend_for": "decode.backends",
    "load_gguf": "model.loading",
    "pack_weights": "model.packed_weights",
    "partial_decoding": "decode.generate",
    "partial_generate": "decode.generate",
    "partial_kv": "decode.generate",
}


def __getattr__(name: str) -> Any:
    """Imports an entry point on first access, so that `import residual_mass` does not load transformers."""
    if name not in ENTRY_POINTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{ENTRY_POINTS[name]}"), name)
