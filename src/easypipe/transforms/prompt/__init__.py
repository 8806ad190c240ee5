"""Prompts: writes rows as texts by formats and templates, with what is trained of them."""
