"""A ledger that keeps every sample and ticket for ever, so that `check` recounts the books from scratch."""

from __future__ import annotations

from typing import Any

from rollout.broker.ledger import Ledger, LedgerError, state_of
from rollout.broker.records import Attempt, Sample


class AuditedLedger(Ledger):
    def __init__(self) -> None:
        super().__init__()
        self._all_samples: list[Sample] = []
        self._all_attempts: list[Attempt] = []
        self._restored_samples = list(self.samples)
        self._restored_tokens = list(self.tokens)

    def issue(self, sample: Sample) -> None:
        super().issue(sample)
        self._all_samples.append(sample)

    def start(self, attempt: Attempt) -> None:
        super().start(attempt)
        self._all_attempts.append(attempt)

    def restore(self, counters: dict[str, Any]) -> None:
        super().restore(counters)
        self._restored_samples = list(self.samples)
        self._restored_tokens = list(self.tokens)

    def check(self) -> None:
        super().check()
        samples = list(self._restored_samples)
        tokens = list(self._restored_tokens)
        for sample in self._all_samples:
            samples[sample.state] += 1
        for attempt in self._all_attempts:
            tokens[state_of(attempt)] += attempt.tokens
        if samples != self.samples or tokens != self.tokens:
            raise LedgerError(f"counted {samples}, {tokens}; the books say {self.samples}, {self.tokens}")
