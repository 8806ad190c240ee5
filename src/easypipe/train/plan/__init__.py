"""A training step compiled for devices that are not there: memory, traffic, speed."""
