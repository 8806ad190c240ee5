"""The interfaces that documents 000 to 004 describe, as thin layers over the same engine.

The docstring of each module names its document.
"""
