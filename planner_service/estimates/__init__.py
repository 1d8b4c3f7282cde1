"""What model-based policies estimate from sums: acceptance by draft position, and step time."""
