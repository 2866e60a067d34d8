"""Asynchronous against synchronous training in time to score: three tasks, five arms, three seeds.

    python -m experiments.time_to_score run [--minutes 60] [--tasks addition,long] [--arms sync,1] [--seeds 0,1,2]
    python -m experiments.time_to_score report

An arm is an asynchronous ratio; `sync` is alpha = 0, where engine and learner take turns and each may use all cores.
Every run of a task has the same start model, the same questions in the same order and the same seconds, counted from
its command. `run` appends one JSON line per finished run to `experiments/results/time_to_score/`, and skips what is
there already, so that the study can be done in several sittings. `report` makes the table and the curves.

The score is the share of right answers among the samples of a training step, at temperature 1. No question comes
twice, so none of them has been trained before it is asked. Samples of a step are up to alpha updates older than the
weights that the step makes: the curves of the asynchronous arms are late by so much, and not early.
"""
