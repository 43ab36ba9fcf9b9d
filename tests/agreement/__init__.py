"""Agreement tests: two ways to ask the same question give the same answer."""
