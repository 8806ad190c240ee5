"""Transforms of columns and rows, and what kind of rows a dataset holds."""
