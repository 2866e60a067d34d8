"""The best action of a game that shows its own table of transitions (`env.unwrapped.P`), by value iteration.

It is the gold player of tabular games: what the check of an environment and a warm start learn from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SWEEPS = 10_000
TOLERANCE = 1e-9

Table = dict[int, dict[int, list[tuple[float, int, float, bool]]]]
"""For each state and action: (probability, next state, reward, whether it ends)."""


def best_actions(table: Table, discount: float) -> np.ndarray:
    """(states,) int: an action of the highest value in each state, where each later step counts `discount` as much.

    On slippery ice a player without haste (0.999) turns to the wall until the ice carries it past a hole: it wins
    nearly always, after hundreds of steps. One in haste (0.95) takes the risk.
    """
    states = sorted(table)
    actions = max(len(row) for row in table.values())
    chance = np.zeros((len(states), actions, len(states)))
    reward = np.full((len(states), actions), -np.inf)

    for state in states:
        for action, outcomes in table[state].items():
            reward[state, action] = sum(p * r for p, _, r, _ in outcomes)
            for p, following, _, ends in outcomes:
                chance[state, action, following] += 0.0 if ends else p

    value = np.zeros(len(states))
    for _ in range(SWEEPS):
        before = value
        value = (reward + discount * chance @ before).max(axis=1)
        if np.abs(value - before).max() < TOLERANCE:
            break
    best: np.ndarray = (reward + discount * chance @ value).argmax(axis=1)
    return best


def table_of(env: Any) -> Table | None:
    """The table of a game; None where the game shows no table, or one that is not of this form."""
    table = getattr(env.unwrapped, "P", None)
    discrete = type(env.observation_space).__name__ == type(env.action_space).__name__ == "Discrete"
    if not isinstance(table, dict) or not discrete or sorted(table) != list(range(len(table))):
        return None
    return table
