"""The callbacks that a run can be given by name, `train.callbacks`: a small file each, its
configuration beside it.

No jax at import time: a configuration is read and checked on machines that only prepare data.
"""
