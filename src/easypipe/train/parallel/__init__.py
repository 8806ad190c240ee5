"""The device mesh, the sharding of arrays on it, and the processes of a run."""
