"""Models: loading, the pool, exact linears and attention, proofs, the compiled build."""
