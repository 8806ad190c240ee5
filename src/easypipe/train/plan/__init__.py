"""Plans of a training step: compiled for devices that are not present; memory, traffic, speed."""
