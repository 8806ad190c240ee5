"""The easypipe command."""
