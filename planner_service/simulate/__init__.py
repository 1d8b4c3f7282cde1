"""Simulator: policies against a cost table, an acceptance process and an arrival trace."""
