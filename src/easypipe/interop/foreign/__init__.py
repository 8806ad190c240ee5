"""Configs of axolotl, TRL and LLaMA-Factory as configs of ours."""
