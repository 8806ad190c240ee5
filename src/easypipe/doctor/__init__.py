"""Tries the project's laws on the user's own machine and config, and says what does not hold."""
