"""The pack stage packs documents into rows of a fixed number of tokens."""
