"""The decoder, its layers, adapters, the classifier, and text generation."""
