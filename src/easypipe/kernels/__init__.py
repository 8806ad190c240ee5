"""Kernels of the loss and of attention, behind one api each.

Names are loaded when first used: they import jax, which preparing data does not need.
"""

from easypipe.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
