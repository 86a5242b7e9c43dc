"""A model's weights from files, as wide as asked for."""
