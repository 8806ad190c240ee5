"""Conversations: writes them as text by chat templates, and finds their trained spans."""
