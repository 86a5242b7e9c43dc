"""Mosaic GPU below Pallas: the only files that touch private parts of JAX."""
