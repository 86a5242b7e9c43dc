"""Pallas GPU kernels for Gated DeltaNet. Imports jax only; gdn_jax calls in, never the reverse."""
