"""Checks of a whole model."""
