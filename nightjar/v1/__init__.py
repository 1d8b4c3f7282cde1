"""Stubs generated from proto/nightjar/v1 by `make proto`; never edited."""
