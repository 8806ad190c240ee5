"""The callbacks that a run can be given by name, `train.callbacks`: a small file each; their options
stand in config.py.
"""
