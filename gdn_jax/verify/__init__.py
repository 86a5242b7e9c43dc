"""Checks, metrics and reports: the evidence that a layer is right."""
