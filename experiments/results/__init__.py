"""Writes docs/results.md, and the table of the README, from the files of this folder.

    python -m experiments.results [--check]

`measured.yaml` says for each row what it is, in which file its figure stands, how the figure is written, and which
command measures it. Nothing else is written by hand.
"""
