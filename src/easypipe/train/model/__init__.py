"""The decoder, its layers, adapters, and text made by it."""
