"""``python -m gdn_jax`` is ``gdn-jax``."""

from gdn_jax.cli import main

if __name__ == "__main__":
    main()
