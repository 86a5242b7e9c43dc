"""The test suite; a package, so that its modules import each other as ``tests.support.cases``."""
