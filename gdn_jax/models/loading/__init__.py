"""A model's weights from files, in the width that is asked for."""
