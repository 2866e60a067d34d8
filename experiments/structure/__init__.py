"""The shape of the code in figures and in one picture."""
