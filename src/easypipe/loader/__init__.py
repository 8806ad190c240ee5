"""Turns planned, saved or streamed rows into batches, on a mesh where one is given."""
