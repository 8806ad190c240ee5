"""Rows that are read forward: canonical streams, their windows, and counts of what was read."""
