"""The mesh, what lies where on it, and the processes of a run."""
