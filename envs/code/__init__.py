"""Single-turn programming problems, scored by their tests in a fresh sandbox."""
