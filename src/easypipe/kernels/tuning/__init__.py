"""Block sizes of the loss kernels: the table of what was measured, and measuring on the device at
hand.
"""
