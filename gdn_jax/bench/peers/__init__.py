"""Other implementations, timed in the same run."""
