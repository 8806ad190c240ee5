"""Block sizes of the loss kernels: the table, and measuring on the device at hand."""
