"""The stages of a pipeline, each in a package with its own config, and what they share."""
