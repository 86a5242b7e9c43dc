"""One layer: its weights, its state, its seven steps and the functions that compose them."""
