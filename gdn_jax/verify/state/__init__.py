"""Checks of many sequences in the slots of a pool."""
