"""Fuzzed agents against the forest of tokens, over chat templates of well-known models."""
