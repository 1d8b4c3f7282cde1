"""Policies that choose a worker for a request, one file each. Pure: values in, a worker out."""
