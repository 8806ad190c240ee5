"""The load stage makes a loader of batches from rows."""
