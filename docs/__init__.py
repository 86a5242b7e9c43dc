"""The documents: pages by hand, and :mod:`docs.generate`, which writes the others."""
