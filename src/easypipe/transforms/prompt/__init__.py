"""Prompts: writes rows as texts by formats and templates, with their trained spans."""
