"""Times of kernels and layers, each behind a correctness check made in the same run."""
