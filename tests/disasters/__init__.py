"""Jobs that are killed, fail, or find their files damaged: what becomes of them, and of the next run."""
