"""Readers against damaged input: ``python -m tests.fuzzing --reader NAME --count N``."""
