"""From a model's logits to text, tokens chosen on the device."""
