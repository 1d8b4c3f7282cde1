"""The planner: policies, what they learned in Redis, and live swaps."""
