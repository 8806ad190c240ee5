"""Reads configs of axolotl, TRL and LLaMA-Factory as configs of easypipe."""
