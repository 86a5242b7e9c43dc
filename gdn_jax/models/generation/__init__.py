"""From a model's logits to text; tokens are chosen on the device."""
