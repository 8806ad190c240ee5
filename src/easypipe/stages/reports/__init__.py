"""Reports of what a pipeline did and would do: ledger, plan report, shares by step."""
