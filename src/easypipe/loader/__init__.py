"""Turns planned, saved or streamed rows into batches, on a mesh if one is given."""
