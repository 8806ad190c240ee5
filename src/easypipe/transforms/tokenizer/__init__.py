"""The tokenizer: is found and loaded, encodes text to token ids, and cuts documents to
max_length.
"""
