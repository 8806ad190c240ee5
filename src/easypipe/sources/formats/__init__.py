"""Readers of file formats: parquet, arrow, JSON, CSV, text, ArrayRecord, MDS, WebDataset."""
