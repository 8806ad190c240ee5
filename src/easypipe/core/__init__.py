"""What every other room may use: errors, configs, storage, retries, randomness.

Imports nothing from easypipe above it, and never jax.
"""
