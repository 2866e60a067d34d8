"""Agents that own their loop: examples of `run(task, endpoint) -> Outcome`."""
