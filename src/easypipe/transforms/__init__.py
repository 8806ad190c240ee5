"""Records to text, and text to tokens."""
