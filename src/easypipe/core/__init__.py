"""Floor 0: what every other room may use. Imports nothing from easypipe above it, and never jax."""
