"""Rows to prompts, by formats and templates."""
