"""How each loss bears stale data: one process that trains on what the policy of d updates ago sampled.

    python -m experiments.staleness run [--minutes 60] [--losses grpo,tis] [--lags 0,4] [--seeds 1]
    python -m experiments.staleness system [--losses reinforce] [--alphas 2,4]
    python -m experiments.staleness report

`run` is the study with a forced lag, `system` the same setting (`recipe.yaml`) in the complete asynchronous system.
Both append one JSON line per finished run to `experiments/results/staleness/`, at once, and skip what is there
already, so an interrupted study goes on where it stopped. `report` makes the table and the figure from these lines.
"""
