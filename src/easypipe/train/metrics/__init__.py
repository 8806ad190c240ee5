"""What a run measures, writes, and draws."""
