"""Policies: pure choices of gamma and what they learn from."""
