"""Commands over whole models: ``gdn-jax generate`` and ``gdn-jax perplexity``."""
