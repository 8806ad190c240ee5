"""Kernels of the loss and of attention, each with one api.

Names are loaded when first used: they import jax, which is not needed to prepare data.
"""

from easypipe.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
