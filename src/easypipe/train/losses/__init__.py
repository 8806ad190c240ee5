"""The losses of a batch: next-token, classification and preference losses, and extra measures."""
