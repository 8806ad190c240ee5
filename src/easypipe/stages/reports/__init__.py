"""Reports on what a pipeline did or would do: ledger, plan report, shares by step."""
