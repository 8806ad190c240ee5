"""The callbacks that a run can be given by name, and their options."""
