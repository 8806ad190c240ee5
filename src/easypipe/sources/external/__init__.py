"""Rows from memory, from Python objects, and from other programs' files of tokens."""
