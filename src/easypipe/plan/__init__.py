"""Which row comes when: integers only, no files, no jax."""
