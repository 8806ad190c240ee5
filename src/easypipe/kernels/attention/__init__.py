"""Attention over packed rows: splash attention on TPUs, flash attention on NVIDIA GPUs."""
