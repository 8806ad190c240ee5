"""The pack stage: documents become rows of a fixed number of tokens."""
