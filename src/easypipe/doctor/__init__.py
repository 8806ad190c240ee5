"""Tries the laws on the user's own machine and config, and says what does not hold."""
