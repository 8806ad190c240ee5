"""What a run measures and writes: metrics.jsonl, rates, device tables, memory."""
