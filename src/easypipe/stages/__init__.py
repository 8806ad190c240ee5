"""Pipeline stages, each beside its own config."""
