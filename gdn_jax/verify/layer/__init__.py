"""Checks of one layer, in float32 and in int4."""
