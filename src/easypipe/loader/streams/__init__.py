"""Rows that are read forward: canonical streams, their windows, and the books of what was read."""
