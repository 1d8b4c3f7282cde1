"""Load on a served system: a client that sends a workload and measures what came back."""
