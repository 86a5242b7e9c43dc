"""What is timed: one module a suite."""
