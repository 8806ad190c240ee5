"""Changing columns: text to tokens."""
