"""The tokenize stage: rows of text, conversations and prompts become documents of tokens."""
