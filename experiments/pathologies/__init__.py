"""Ten seeded pathologies, each in a run of its own: which alarm names it, and after which step."""
