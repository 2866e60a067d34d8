"""What the checks found, and the page that says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from envs.audit.auditor import Tally
from envs.check.player import PlayResult

Verdict = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    said: str


@dataclass(frozen=True)
class Earned:
    """What one agent got in the same tasks as the others."""

    agent: str
    success: float
    reward: float
    turns: float

    @classmethod
    def of(cls, agent: str, outcomes: list[PlayResult]) -> Earned:
        played = [outcome for outcome in outcomes if not outcome.error]
        count = max(1, len(played))
        return cls(
            agent,
            sum(outcome.success for outcome in played) / count,
            sum(outcome.reward for outcome in played) / count,
            sum(len(outcome.rewards) for outcome in played) / count,
        )


@dataclass
class Page:
    environment: str
    tasks: dict[str, int]
    findings: list[Finding] = field(default_factory=list)
    earned: list[Earned] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    """Tasks by the share of a model's tries that solved them: ten equal parts, then those always solved."""
    audit: Tally | None = None
    seconds: float = 0.0

    def add(self, check: str, wrong: str, fine: str, note: bool = False) -> None:
        """`wrong`: empty if the check holds; `note`: it is only worth knowing."""
        verdict: Verdict = "ok" if not wrong else "note" if note else "FAIL"
        self.findings.append(Finding(check, verdict, wrong or fine))

    @property
    def failed(self) -> list[str]:
        return [finding.check for finding in self.findings if finding.verdict == "FAIL"]

    def text(self) -> str:
        counts = ", ".join(f"{count} {split}" for split, count in self.tasks.items())
        lines = [f"env {self.environment}: {counts} tasks, checked in {self.seconds:.0f} s", ""]
        lines += [f"{each.verdict:4} {each.check:14} {each.said}" for each in self.findings]

        lines += ["", f"     {'agent':34} success    reward   turns"]
        for row in self.earned:
            lines.append(f"     {row.agent:34} {row.success:7.3f} {row.reward:9.3f} {row.turns:7.1f}")
        if self.histogram:
            lines += ["", "     tasks by the share of a model's tries that solve them", *self._bars()]

        failed = self.failed
        verdict = "every check holds" if not failed else f"{len(failed)} checks fail: {', '.join(failed)}"
        return "\n".join([*lines, "", f"{self.environment}: {verdict}"])

    def _bars(self) -> list[str]:
        most = max(self.histogram) or 1
        parts = [f"{tenth / 10:.1f} to {tenth / 10 + 0.1:.1f}" for tenth in range(10)] + ["always"]
        return [
            f"     {part:>10} {count:5d} {'#' * round(40 * count / most)}"
            for part, count in zip(parts, self.histogram, strict=True)
        ]
