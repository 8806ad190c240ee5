"""What every other room may use: errors, configs, storage, retries, randomness.

It imports nothing from easypipe above it, and never jax.
"""
