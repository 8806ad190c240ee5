"""easypipe turns raw text into a trained model, in JAX; the order of its data is computed.

Names are loaded on first use, so that `import easypipe` is fast and does not load jax;
`__init__.pyi` lists them with their modules.
"""

from easypipe.core.lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__, "__version__")
