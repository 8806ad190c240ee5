"""The pack stage lays documents into rows of a fixed number of tokens."""
