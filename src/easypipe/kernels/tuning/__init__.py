"""Block sizes of the loss kernels: the table of what was measured, and the measuring."""
