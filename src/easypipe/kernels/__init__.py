"""Loss kernels behind one api."""
