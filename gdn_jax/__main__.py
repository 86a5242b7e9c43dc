"""``python -m gdn_jax`` is ``gdn-jax``."""

from gdn_jax.cli.main import main

if __name__ == "__main__":
    main()
