"""The tokenizer: its files, encoding text to token ids, and cutting to max_length."""
