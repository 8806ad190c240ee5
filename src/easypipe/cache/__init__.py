"""The token cache: documents as token ids in memory-mapped files."""
