"""`nightjar bench calibrate`: what steps cost on this machine, for its planner to start from."""
