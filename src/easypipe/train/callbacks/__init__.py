"""The callbacks that a run can be given by name: a small file each; their options in config.py."""
