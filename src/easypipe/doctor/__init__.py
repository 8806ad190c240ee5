"""Tests the project's guarantees on the user's machine and config, and says which do not hold."""
