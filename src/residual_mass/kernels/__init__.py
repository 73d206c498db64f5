"""Compiled decode attention on CPUs, over caches in bit planes, in 8 bits and in bfloat16."""

from residual_mass.kernels.cache import LayerCache
from residual_mass.kernels.library import Library, load

__all__ = ["LayerCache", "Library", "load"]
