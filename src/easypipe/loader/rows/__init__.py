"""Rows by number: planned over token caches, stored in files, or returned by objects."""
