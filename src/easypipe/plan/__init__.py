"""Decides which document stands in which row, with integers only: no files, no jax."""
