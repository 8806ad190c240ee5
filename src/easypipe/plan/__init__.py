"""Decides which document is in which row, with integers only: no files, no jax."""
