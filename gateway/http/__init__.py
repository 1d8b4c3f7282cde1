"""OpenAI-compatible HTTP in front of the dispatcher."""
