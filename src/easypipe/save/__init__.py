"""Saves rows and documents into folders of shards, reads them back, and verifies them."""
