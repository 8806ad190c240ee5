"""Checkpoints: their files, their commit, and the manager for users' own training loops."""
