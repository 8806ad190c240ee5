"""From planned rows to batches on a mesh."""
