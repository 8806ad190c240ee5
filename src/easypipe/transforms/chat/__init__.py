"""Conversations: writes them as text by chat templates, and finds what is trained."""
