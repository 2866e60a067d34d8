"""Randomness as pure functions of the run's seed, so that a plain reference loop can reproduce it."""

from __future__ import annotations

import hashlib

import numpy as np


def sample_seed(run_seed: int, sample_id: int) -> int:
    """Seed of one sample, in [0, 2**63): the first 8 bytes of blake2b("<run_seed>/<sample_id>"), little endian, >> 1.

    It depends on nothing else, so a sample tried again draws the same tokens from the same policy.
    Evaluation task i counts as sample -1 - i.
    """
    digest = hashlib.blake2b(b"%d/%d" % (run_seed, sample_id), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def task_order(run_seed: int, data_pass: int, tasks: int) -> np.ndarray:
    """The order in which pass `data_pass` over the data visits its tasks: a permutation, (tasks,) int64."""
    return np.random.default_rng([abs(run_seed), data_pass]).permutation(tasks)


def turn_seed(ticket_seed: int, turn: int) -> int:
    """Seed of one generation request, in [0, 2**63): of its ticket's seed and the number of requests before it."""
    digest = hashlib.blake2b(b"%d:%d" % (ticket_seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
