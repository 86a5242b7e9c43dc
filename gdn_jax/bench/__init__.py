"""Times of kernels, layers and models, each after a correctness check in the same run."""
