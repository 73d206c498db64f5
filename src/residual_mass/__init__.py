"""Residual-mass accounting for partial-KV decoding: the method, and a pipeline that reproduces its paper.

`PhiMaps`, `partial_kv` and `partial_generate` are the library's entry points; `residual_mass.core` holds the
mathematics and needs torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residual_mass.model.partial import partial_kv
    from residual_mass.model.phi_maps import PhiMaps
    from residual_mass.model.static_decode import partial_generate

__version__ = "0.1.0"
__all__ = ["PhiMaps", "__version__", "partial_generate", "partial_kv"]


def __getattr__(name: str) -> Any:
    """Loads transformers only when the library's entry points are asked for."""
    if name == "partial_kv":
        from residual_mass.model.partial import partial_kv

        return partial_kv
    if name == "partial_generate":
        from residual_mass.model.static_decode import partial_generate

        return partial_generate
    if name == "PhiMaps":
        from residual_mass.model.phi_maps import PhiMaps

        return PhiMaps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
