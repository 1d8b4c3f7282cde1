"""The step loop and what it owns: scheduler, blocks, decisions, elastic memory. No gRPC."""
