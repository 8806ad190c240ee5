"""Turns records into text (columns, prompts, chat templates), and text into token ids."""
