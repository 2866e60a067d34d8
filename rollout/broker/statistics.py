"""What the closing report says beside the ledger: staleness, and what was kept against what was issued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field, structs

from rl.wire.messages import NO_OPINION
from rollout.broker.actions import BatchSample, EmitBatch, EpisodeOutcome, EvalEpisode, EvalReport
from rollout.broker.ledger import Ledger
from rollout.broker.records import ENDS, NAMES, Attempt, Group, State

_SIZES = ("length", "turns")
_COUNTED = ("freshness_violations", "hedged", "hedges_won", "duplicates", "other_timeline", "refused_trajectories")


class Tally(Struct):
    """Sums over finished episodes."""

    episodes: int = 0
    success: float = 0.0
    turns: int = 0
    length: int = 0  # generated tokens
    seconds: float = 0.0
    unrewarded: int = 0  # of them: nobody knows whether they succeeded

    def add(self, outcome: EpisodeOutcome) -> None:
        self.episodes += 1
        if outcome.unrewarded:
            self.unrewarded += 1
        else:
            self.success += outcome.success
        self.turns += outcome.turns
        self.length += outcome.length
        self.seconds += outcome.seconds

    def means(self) -> dict[str, float]:
        count = max(1, self.episodes)
        sums = {"turns": self.turns, "length": self.length, "seconds": self.seconds}
        means = {name: total / count for name, total in sums.items()}
        return {"episodes": self.episodes, "success": self.success / max(1, self.judged), **means}

    @property
    def judged(self) -> int:
        return self.episodes - self.unrewarded


class Cut(Struct):
    """Episodes that were not trained, by the end for which.

    Everything is known of those that had finished. Of those that were still running it is known how far they had come
    by then, which is at most what they would have had. These were cancelled, or failed: then it is one attempt of
    perhaps several. The losing copy of a slow episode is a `redundant` one.
    """

    finished: Tally = field(default_factory=Tally)
    running: int = 0
    tokens: int = 0  # generated, as generators report them
    turns: int = 0  # begun, of those whose server told it (it did not die)
    told: int = 0
    seconds: float = 0.0

    def means(self) -> dict[str, Any]:
        count = max(1, self.running)
        cut = {
            "episodes": self.running,
            "turns": self.turns / max(1, self.told),
            "tokens": self.tokens / count,
            "seconds": self.seconds / count,
        }
        return {"finished": self.finished.means(), "running": cut}


class Statistics(Struct):
    """Plain data: it goes into the journal as it stands."""

    freshness_violations: int = 0
    staleness: dict[int, int] = {}  # trained samples by staleness s - v(sample)
    kept: Tally = field(default_factory=Tally)
    issued: Tally = field(default_factory=Tally)  # every episode that finished, trained or not
    cut: dict[str, Cut] = {}
    hedged: int = 0  # second copies of slow episodes
    hedges_won: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    eval_first: EvalReport | None = None
    eval_last: EvalReport | None = None
    duplicates: int = 0  # results of tickets that had ended
    other_timeline: int = 0  # results begun by a policy of another timeline
    refused_trajectories: int = 0  # by `validation.fault`

    def cut_running(self, attempt: Attempt, turns: int | None, now: float) -> None:
        """A ticket has ended without a result, `turns` into its episode; without a cancel it has failed."""
        attempt.cut = attempt.cut or NAMES[State.FAILED]
        cut = self.cut.setdefault(attempt.cut, Cut())
        cut.running += 1
        cut.tokens += attempt.tokens
        cut.seconds += now - attempt.issued_at
        if turns is not None:
            cut.turns += turns
            cut.told += 1

    def cut_late(self, end: str, tokens: int) -> None:
        """A generator's report of such a ticket, which came after its end."""
        if end in self.cut:
            self.cut[end].tokens += tokens

    def cut_finished(self, end: str, outcome: EpisodeOutcome) -> None:
        self.cut.setdefault(end, Cut()).finished.add(outcome)

    def assembled(self, batch: EmitBatch, bound: int) -> None:
        """Independent of the broker's own versions: from what each episode says of itself."""
        staleness = [batch.step - sample.outcome.version for sample in batch.samples]
        self.freshness_violations += sum(each > bound for each in staleness)

    def trained(self, step: int, groups: list[Group]) -> None:
        batch = [member.outcome for group in groups for member in group.members if member.outcome is not None]
        for outcome in batch:
            staleness = step - outcome.version
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
            self.kept.add(outcome)

        if rewards := [outcome.reward for outcome in batch if not outcome.unrewarded]:
            self.reward_last = sum(rewards) / len(rewards)
            self.reward_first = self.reward_last if self.reward_first is None else self.reward_first

    def evaluated(self, report: EvalReport) -> None:
        self.eval_first = self.eval_first or report
        self.eval_last = report

    def report(self, steps: int, ledger: Ledger) -> dict[str, Any]:
        """The closing report.

        `kept_over_issued_length`: mean tokens of a trained sample / mean tokens of every ticket that generated any,
        both as generators report them. Tickets that were cut off count with what they had
        generated by then, so a value below 1 is certain evidence of a bias towards short episodes. None without tokens.
        """
        useful = ledger.tokens[State.TRAINED]
        spent = sum(ledger.tokens)
        trained = ledger.samples[State.TRAINED]
        ratio = (useful / trained) / (spent / ledger.attempts_with_tokens) if spent and trained else None
        staleness = {
            "mean": sum(k * v for k, v in self.staleness.items()) / max(1, sum(self.staleness.values())),
            "max": max(self.staleness, default=0),
            "histogram": {str(k): v for k, v in sorted(self.staleness.items())},
        }

        return {
            "steps": steps,
            "staleness": staleness,
            "ledger": ledger.report(),
            "ledger_mismatches": ledger.mismatches,
            "eval": {"first": _eval_report(self.eval_first), "last": _eval_report(self.eval_last)},
            "reward": {"first": self.reward_first, "last": self.reward_last},
            "useful_tokens": useful,
            "useful_share": ledger.useful_share,
            "kept_over_issued_length": ratio,
            "kept": self.kept.means(),
            "issued": self.issued.means(),
            "cut": {end: cut.means() for end, cut in sorted(self.cut.items())},
            "kept_against_cut": self._kept_against_cut(),
        } | {name: getattr(self, name) for name in _COUNTED}

    def _kept_against_cut(self) -> dict[str, dict[str, float | None]]:
        """Length, turns and success of trained episodes, and of all that were cut; None: nothing is known.

        What failed was not cut: nobody decided against it, and what it had generated is mostly not told.

        Those cut while they ran count with what they had by then. So a mean above that of the kept ones is certain
        evidence of a bias against long episodes. Nobody knows whether they would have succeeded.
        """
        cuts = [cut for end, cut in self.cut.items() if end != NAMES[State.FAILED]]
        lost: dict[str, list[tuple[float, int]]] = {
            "length": [(cut.finished.length + cut.tokens, cut.finished.episodes + cut.running) for cut in cuts],
            "turns": [(cut.finished.turns + cut.turns, cut.finished.episodes + cut.told) for cut in cuts],
            "success": [(cut.finished.success, cut.finished.judged) for cut in cuts],
        }
        kept = self.kept
        of = {"length": kept.episodes, "turns": kept.episodes, "success": kept.judged}
        return {
            name: {"kept": _mean([(getattr(kept, name), of[name])]), "cut": _mean(sums)} for name, sums in lost.items()
        }


def _mean(sums: list[tuple[float, int]]) -> float | None:
    count = sum(episodes for _, episodes in sums)
    return sum(total for total, _ in sums) / count if count else None


def batch_metrics(step: int, samples: list[BatchSample]) -> dict[str, float]:
    """Means over one batch, under the names that the tracker shows."""
    outcomes = [sample.outcome for sample in samples]
    unrewarded = [outcome.unrewarded for outcome in outcomes if outcome.unrewarded]
    count = len(samples)
    staleness = [step - sample.outcome.version for sample in samples]
    shares = {f"staleness/{k}": staleness.count(k) / count for k in sorted(set(staleness))}

    means = {
        "reward/failed": float(len(unrewarded) - unrewarded.count(NO_OPINION)),
        "reward/no_opinion": float(unrewarded.count(NO_OPINION)),
        **_means("rollout/", outcomes, {"reward": "reward", "accuracy": "success"}),
        "rollout/length": sum(o.length for o in outcomes) / count,
        "rollout/turns": sum(o.turns for o in outcomes) / count,
        "rollout/episode_s": sum(o.seconds for o in outcomes) / count,
        "staleness/mean": sum(staleness) / count,
        "staleness/max": float(max(staleness)),
    }
    return means | shares | labelled_metrics("rollout", outcomes)


def labelled_metrics(prefix: str, episodes: Sequence[EpisodeOutcome | EvalEpisode]) -> dict[str, float]:
    """The metrics of each environment, where a run plays several: its episodes, and their means."""
    metrics: dict[str, float] = {}
    for label in sorted({each.label for each in episodes} - {""}):
        chosen = [each for each in episodes if each.label == label]
        where = f"{prefix}/{label}/"
        metrics |= _means(where, chosen, {"reward": "reward", "accuracy": "success"})
        metrics |= {f"{where}{name}": sum(getattr(each, name) for each in chosen) / len(chosen) for name in _SIZES}
        metrics[f"{where}episodes"] = float(len(chosen))
    return metrics


def rate_columns(where: str, rates: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """The accuracy and each pass@k, with the ends of its 95 % interval over tasks."""
    columns: dict[str, float] = {}
    for name, (mean, low, high) in rates.items():
        column = where + ("accuracy" if name == "avg" else name)
        columns |= {column: mean, f"{column}_low": low, f"{column}_high": high}
    return columns


def _means(where: str, episodes: Sequence[EpisodeOutcome | EvalEpisode], names: dict[str, str]) -> dict[str, float]:
    """Over those whose reward is known; nothing where there are none."""
    known = [each for each in episodes if isinstance(each, EvalEpisode) or not each.unrewarded]
    return {
        f"{where}{name}": sum(getattr(each, of) for each in known) / len(known) for name, of in names.items() if known
    }


def state_metrics(ledger: Ledger, counts: dict[str, float]) -> dict[str, float]:
    """Samples by state, and what hooks did."""
    queue = {f"queue/{NAMES[state]}": ledger.samples[state] for state in State if state not in ENDS}
    ends: dict[str, float] = {
        f"broker/{NAMES[state]}_samples": ledger.samples[state]
        for state in (State.STALE, State.FILTERED, State.SETTLED, State.REDUNDANT, State.FAILED)
    }
    ends |= {"broker/useful_share": ledger.useful_share, "broker/unused_tokens": ledger.unused}
    done = {f"broker/{name}": count for name, count in counts.items()}
    return {name: float(value) for name, value in (queue | ends | done).items()}


def _eval_report(report: EvalReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    row = structs.asdict(report)
    del row["episodes"]
    return row | {"version": report.version.n, "versions": {str(k): v for k, v in report.versions.items()}}
