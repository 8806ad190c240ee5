"""What is in a dataset, and a config that reads it."""
