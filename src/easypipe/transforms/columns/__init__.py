"""Transforms of columns and rows."""
