"""The tokenize stage: rows become documents of tokens."""
