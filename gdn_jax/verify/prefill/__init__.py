"""Checks of many tokens at once."""
