"""Connects other libraries with easypipe; each is imported when it is first used."""
