"""Rows of a data set with reward functions of a user's own, or a language model as the judge."""
