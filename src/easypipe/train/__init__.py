"""The trainer: model, optimizer, step, checkpoints, metrics."""
