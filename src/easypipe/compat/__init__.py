"""Interfaces that the seed documents name, thin over the one engine: each module says which one."""
