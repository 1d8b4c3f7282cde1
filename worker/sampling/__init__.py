"""From logits to token ids: processors and shared noise."""
