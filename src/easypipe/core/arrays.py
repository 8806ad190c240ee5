"""Short names for the types of NumPy arrays that signatures give: Ints and Bools."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
