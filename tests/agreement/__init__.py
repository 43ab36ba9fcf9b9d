"""Agreement tests: two ways to compute the same figure give equal results."""
