"""Policies of other packages, in one process of their own: what they do wrong stays there."""
