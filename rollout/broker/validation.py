"""The one check of a trajectory before it counts, with its ticket and the vocabulary at hand.

An environment server, or the environment in it, may be faulty in ways that are consistent in themselves. What is
refused here is a failed ticket with a reason. It is counted in the closing report (`refused_trajectories`) and never
trained.

An episode that never asked the model has no token to train on: it is refused like one whose tokens are all masked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np

from rl.wire import messages
from rl.wire.columns import Scope, mismatch
from rl.wire.messages import LARGEST_REWARD, Message, ProtocolError, Ticket, TokenSequence, Trajectory, Version
from rl.wire.run import RunFile

NOT_LIVE = "its ticket has ended, or never was"

HIGHEST_LOGP = 1e-3  # rounding of a log-softmax in low precision
LOWEST_LOGP = -1e4  # nothing is sampled with a probability of e^-10 000
LARGEST_NUMBER = 1e15  # of what an environment counts; sums of these stay finite
LONGEST_S = 1e9
MOST_SEQUENCES = 4096  # of one episode, whose history may fork
LONGEST_LABEL = 64  # characters
LONGEST_REASON = 500  # characters, of a failure
MOST_INFO = 256  # numbers of one episode: each name is a column of the metrics
MOST_TOKENS = 1 << 31  # that one episode samples, aborted parts included

_IDENTITY = ("sample_id", "group_id", "task_index", "kind")


def vocabulary_of(run: RunFile) -> int:
    """Ids are below this number; without a model any id that the column can hold is."""
    if run.model_folder is None:
        return 1 << 31
    config = json.loads((run.model_folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def fault(trajectory: Trajectory, ticket: Ticket | None, newest: Version, vocabulary: int) -> str:
    """What is wrong with a trajectory, in one line that begins with the field, or the empty string.

    ticket: the live one that it answers, None if there is none. newest: the newest version that there can be.
    """
    if ticket is None:
        return NOT_LIVE
    return next(_faults(trajectory, ticket, newest, vocabulary), "")


def _faults(trajectory: Trajectory, ticket: Ticket, newest: Version, vocabulary: int) -> Iterator[str]:
    """Each check may rely on those before it."""
    for name in _IDENTITY:
        claimed = getattr(trajectory, name)
        if claimed != getattr(ticket, name):
            yield f"{name} {claimed!r}: its ticket is for {getattr(ticket, name)!r}"

    if not 1 <= len(trajectory.sequences) <= MOST_SEQUENCES:
        yield f"sequences: {len(trajectory.sequences)}, a trajectory has 1 to {MOST_SEQUENCES}"
    generated = 0
    for sequence in trajectory.sequences:
        tokens = sequence.columns["token_ids"].size if "token_ids" in sequence.columns else 0
        entries: dict[Scope, int] = {"token": tokens, "turn": len(sequence.turns), "sequence": 1}
        if wrong := mismatch(sequence.columns, entries):
            yield wrong
        own = int(np.count_nonzero(sequence.loss_mask))
        if not own:
            yield "loss_mask: no token was generated"
        generated += own

    # Apart: a column of the sample must not take the place of one that was checked.
    if wrong := mismatch(trajectory.columns, {"sample": 1}):
        yield wrong
    if not generated <= trajectory.tokens_generated <= MOST_TOKENS:
        yield f"tokens_generated {trajectory.tokens_generated}: {generated} stand in the loss mask"
    if not ticket.version.timeline <= trajectory.timeline <= newest.timeline:
        bounds = f"its ticket's, {ticket.version.timeline}, and {newest.timeline}"
        yield f"timeline {trajectory.timeline}: it lies between {bounds}"

    for sequence in trajectory.sequences:
        yield from _token_faults(sequence, vocabulary)
        yield from _version_faults(
            sequence, ticket, newest.n if trajectory.timeline == ticket.version.timeline else None
        )
        yield from _turn_faults(sequence)
    yield from _order_faults(trajectory)
    yield from _number_faults(trajectory)

    for columns in (trajectory.columns, *(sequence.columns for sequence in trajectory.sequences)):
        for name, array in columns.items():
            if array.dtype.kind == "f" and name != "logp_behavior" and not np.isfinite(array).all():
                yield f"{name} is not finite"


def _token_faults(sequence: TokenSequence, vocabulary: int) -> Iterator[str]:
    """Comparisons are written so that NaN is refused."""
    ids = sequence.token_ids.view(np.uint32)  # a negative one is a large one
    if ids.max() >= vocabulary:
        yield f"token_ids hold {sequence.token_ids[ids.argmax()]}: the vocabulary has {vocabulary} ids"

    logp = sequence.logp_behavior
    if not (logp.max() <= HIGHEST_LOGP and logp.min() >= LOWEST_LOGP):
        wrong = logp[~((logp <= HIGHEST_LOGP) & (logp >= LOWEST_LOGP))]
        yield f"logp_behavior holds {wrong[0]:g}: a log-probability lies in [{LOWEST_LOGP:g}, 0]"


def _version_faults(sequence: TokenSequence, ticket: Ticket, newest: int | None) -> Iterator[str]:
    """F2. newest: None if the trajectory is of another timeline, whose numbers say nothing here."""
    mask = sequence.loss_mask
    versions = sequence.policy_version
    if np.count_nonzero(mask != (versions >= 0).view(np.uint8)):
        if mask.max() > 1:
            yield f"loss_mask holds {mask.max()}, other than 0 and 1"
        yield "policy_version: a token has one if it was generated (loss_mask), and else -1"

    oldest = sequence.oldest_version
    latest = int(versions.max())
    if oldest < latest:
        sampled = versions[versions >= 0]
        if np.count_nonzero(sampled[1:] < sampled[:-1]):
            yield f"policy_version goes back from {latest}: a request was not gated at its history's newest one"

    if newest is not None and oldest < ticket.version.n:
        yield f"policy_version {oldest} is older than its ticket's, {ticket.version.n}"
    if newest is not None and latest > newest:
        yield f"policy_version {latest} does not exist yet: the newest is {newest}"


def _turn_faults(sequence: TokenSequence) -> Iterator[str]:
    """Turns are ascending spans of one token or more, and all of the generated tokens."""
    mask = sequence.loss_mask
    generated = int(np.count_nonzero(mask))
    end = covered = both = 0
    for turn in sequence.turns:
        if not end <= turn.start < turn.end <= mask.size:
            yield f"turns: [{turn.start}, {turn.end}) after {end} of {mask.size} tokens"
        end = turn.end
        covered += end - turn.start
        both += int(np.count_nonzero(mask[turn.start : end]))

        if not (0 <= turn.generate_s <= LONGEST_S and 0 <= turn.env_s <= LONGEST_S):
            yield f"turns: {turn.generate_s} s of generation and {turn.env_s} s of environment"
    if not 0 <= sequence.shared <= min((turn.start for turn in sequence.turns), default=0):
        yield f"shared {sequence.shared}: what an earlier sequence has as well ends before the first turn"
    if not covered == both == generated:
        yield f"turns: {covered} tokens of turns, {generated} in the loss mask, {both} in both"


def _order_faults(trajectory: Trajectory) -> Iterator[str]:
    """Of any two turns of different sequences it is known which came first; within a sequence they stand in time.

    No number is left out: those of a sequence that was dropped, a sub-agent's say, would be.
    """
    seen: set[int] = set()
    for sequence in trajectory.sequences:
        numbers = [turn.number for turn in sequence.turns]
        if numbers != sorted(numbers):
            yield f"turns: number {max(numbers)} stands before a smaller one of its sequence"
        if shared := seen.intersection(numbers):
            yield f"turns: two sequences have one of number {min(shared)}: which came first is not known"
        seen.update(numbers)
    if dropped := set(range(len(seen))) - seen:
        yield f"turns: there is none of number {min(dropped)}: it was sampled, and would not be trained"


def _number_faults(trajectory: Trajectory) -> Iterator[str]:
    rewards = [turn.reward for turn in trajectory.turns]
    for reward in (trajectory.reward, *rewards):
        if not abs(reward) <= LARGEST_REWARD:
            yield f"reward {reward:g}: its size may be at most {LARGEST_REWARD:g}"
    if not math.isclose(trajectory.reward, math.fsum(rewards), rel_tol=1e-6, abs_tol=1e-6):
        yield f"reward {trajectory.reward:g}: its turns' add up to {math.fsum(rewards):g}"

    if not 0 <= trajectory.seconds <= LONGEST_S:
        yield f"seconds {trajectory.seconds:g}"
    if len(trajectory.label) > LONGEST_LABEL or "/" in trajectory.label:
        yield f"label {trajectory.label[:LONGEST_LABEL]!r}: a word of at most {LONGEST_LABEL} characters"
    if len(trajectory.info) > MOST_INFO or any(len(name) > LONGEST_LABEL for name in trajectory.info):
        yield f"info: {len(trajectory.info)} numbers; at most {MOST_INFO}, with names of {LONGEST_LABEL} characters"
    for name, value in trajectory.info.items():
        if not abs(value) <= LARGEST_NUMBER:
            yield f"info {name!r}: {value:g}: its size may be at most {LARGEST_NUMBER:g}"


def check_report(message: Message, newest: Version, max_model_len: int) -> None:
    """Raises ProtocolError for what no proxy would report now. newest: the newest version that there can be."""
    match message:
        case messages.Usage(_, tokens):
            most = max_model_len * (newest.n + 2)  # an update may begin a response anew
            if not 0 <= tokens <= most:
                raise ProtocolError(f"Usage of {tokens} tokens: one request samples at most {most}")
        case messages.FirstToken(version=version):
            if version > newest or version.n < 0:
                raise ProtocolError(f"FirstToken of version {version.timeline}.{version.n}, which is not out yet")


def check_wish(message: Message, n: int, e: int, eval_tasks: int) -> None:
    """Raises ProtocolError for what no learner would say now. n: the published version; e: assembled batches."""
    match message:
        case messages.BatchRequest(step):
            fits = 0 <= step <= e + 1  # one ahead
        case messages.Published(version):
            fits = version.timeline >= 0 and 0 <= version.n <= e
        case messages.EvalRequest(version, tasks):
            fits = 0 <= version.n <= e and 1 <= tasks <= eval_tasks
        case messages.SaveRequest(version, newest):
            fits = n <= version.n <= e and 0 <= newest <= n
        case _:
            fits = False

    if not fits:
        raise ProtocolError(f"{message!r:.200} of the learner, at version {n} with {e} batches assembled")
