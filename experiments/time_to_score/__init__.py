"""Asynchronous against synchronous training in time to score: three tasks, five arms, three seeds.

    python -m experiments.time_to_score run [--minutes 60] [--tasks addition,long] [--arms sync,1] [--seeds 0,1,2]
    python -m experiments.time_to_score report

The tasks are two-digit `addition`, the same behind a `long` tail of thinking (outputs of 13 to 506 tokens), and
`alfworld`: games of two types in small rooms, by the recipe `alfworld_small`. An arm is an asynchronous ratio; `sync`
is alpha = 0, where engine and learner take turns and each may use all cores. Every run of a task has the same start
model and the same seconds, counted from its command; the start model, questions and games are made before. Runs of one
seed draw the same questions or games in the same order. `run` appends one JSON line per finished run to
`experiments/results/time_to_score/`, and skips what is there already, so that the study can be done in several
sittings. `report` makes the tables and the curves, and says for each task which alpha is soonest.

The score is the share of right answers or won games among the samples that were rolled out for a training step, at
temperature 1; in `alfworld` that is before groups of equal rewards are dropped. No question and no game comes twice, so
none has been trained before it is asked; a run ends early where it has drawn all. Samples of a step are up to alpha
updates older than the weights that the step makes: the curves of the asynchronous arms are late by so much, and not
early.
"""
