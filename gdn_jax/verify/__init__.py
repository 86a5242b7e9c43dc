"""Checks: the evidence that a layer, a pool, a prefill and a model are right."""
