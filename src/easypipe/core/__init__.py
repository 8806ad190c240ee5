"""What every other package may use: errors, configs, storage, retries, randomness.

It imports nothing else from easypipe, and never jax.
"""
