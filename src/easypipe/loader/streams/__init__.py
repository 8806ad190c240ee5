"""Rows that are read forward: canonical streams, their windows, and the counts of what was read."""
