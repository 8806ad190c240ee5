"""Where other libraries meet easypipe; each is imported when it is first used."""
