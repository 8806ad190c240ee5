"""Weights of published models: which families, how they are read, how they are written."""
