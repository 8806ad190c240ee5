"""The callbacks that a run can have by name, and their options."""
