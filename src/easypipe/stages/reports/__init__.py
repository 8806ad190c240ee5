"""What a pipeline did and would do: ledger, plan report, shares."""
