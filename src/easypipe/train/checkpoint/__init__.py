"""Checkpoints: their files, their commit, and the manager for loops of one's own."""
