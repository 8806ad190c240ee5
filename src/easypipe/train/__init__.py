"""Training: model, optimizer, step, checkpoints, metrics.

Names are loaded when first used: they import jax, and the configuration of a run is read without
it.
"""

from easypipe.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
