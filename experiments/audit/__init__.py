"""The audit of every verifier, in one table."""
