"""The loss kernels of TPUs, in Pallas: tiles in VMEM (forward, backward), and rows of logits."""
