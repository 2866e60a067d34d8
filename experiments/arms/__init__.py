"""Studies: one recipe in several arms and seeds, and the table of what the runs came to.

    python -m experiments.arms experiments/studies/addition.yaml [--minutes 60] [--table] [--out FOLDER] [--runs FOLDER]

A study is a YAML file (`experiments/arms/study.py` says what stands in it). Each finished run is appended at once to
`runs.jsonl` in the folder of its results. What stands there is not played again, so a study can be made in several
sittings. `README.md` beside it is the table of what is there; `--table` writes it without a run.
"""
