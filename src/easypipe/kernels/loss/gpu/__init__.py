"""The loss kernels of NVIDIA GPUs: slabs of logits by cuBLAS, and rows of them in Pallas."""
