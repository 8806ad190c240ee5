"""The tokenizer: finds and loads it, encodes text to token ids, and cuts documents to max_length."""
