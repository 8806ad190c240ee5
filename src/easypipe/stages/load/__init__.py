"""The load stage: rows become a loader."""
