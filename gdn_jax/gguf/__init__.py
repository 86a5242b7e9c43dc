"""Gated DeltaNet layers in GGUF files: how they lie there, reading and writing them."""
