"""Nightjar: LLM serving whose speculation length adapts to the load. What all services share."""

__version__ = "0.1.0"
