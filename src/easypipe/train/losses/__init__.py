"""The losses of a batch."""
