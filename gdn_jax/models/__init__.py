"""Whole models: blocks of Gated DeltaNet layers and of gated full attention."""
