"""Conversations to text, by chat templates, with the characters that are trained."""
