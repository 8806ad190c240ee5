"""Rows and documents to folders of shards, and back."""
