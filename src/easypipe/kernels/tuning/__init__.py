"""Block sizes of the loss kernels: the table of measured sizes, and the measuring."""
