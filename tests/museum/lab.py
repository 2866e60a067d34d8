"""A run small enough to be spoilt fifty times: every decision is the production code's, in one process.

The learner's own loop (`rl.learner.process.train`) with its trainer, publisher and guards; the broker's core, assembly
and guards; the updater's core with its proof of loads; real episodes. Played by the lab are only the sockets and the
engine: transformers' own forward over weights that were loaded from a published slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rl.config.schema import Config, load_config
from rl.learner.batches import check_batch_part
from rl.learner.guards import ExactCheck, StepGuards
from rl.learner.process import train
from rl.learner.trainer import Trainer
from rl.models.naming import in_files
from rl.models.protocol import Placement
from rl.observe.alarms import Alarms, RunAlarm
from rl.observe.trace import NO_TRACE
from rl.weights.channel import Piece
from rl.weights.host.ends import tensors, write
from rl.weights.host.layout import Manifest, digest
from rl.weights.updater import Mismatch, UpdaterCore, tolerance
from rl.wire.messages import BatchPart, Generate, Generated, Ticket, Trajectory, Version, WeightStatus
from rollout.broker.actions import Action, EmitBatch, EvalReport, GroupRecord, IssueTicket, StopRun
from rollout.broker.assembly import make_batch_parts, outcome_of
from rollout.broker.core import BrokerCore
from rollout.broker.guards import BatchGuards
from rollout.broker.process import RunStopped
from rollout.broker.rules import Rules
from rollout.broker.validation import fault
from rollout.episodes.environment import ChatMessage, Step
from rollout.episodes.episode import EpisodeContext, run_episode
from rollout.episodes.tokenizer import IdTokenizer
from tests.rl.learner.tiny_policies import VOCAB

TASKS = 40
STOPS = list(range(10))  # of 67 ids that an untrained model draws about evenly
LENGTH = 12
SETTINGS = (
    "learner.kind=fsdp",
    "model.dtype=float32",
    "generator.dtype=float32",
    "generator.max_model_len=256",
    f"sampling.max_tokens={LENGTH}",
    "sampling.temperature=0.8",
    "env.max_turns=2",
    "rollout.groups_per_batch=8",
    "rollout.group_size=2",
    "rollout.alpha=0",
    "learner.lr=5e-3",
    "learner.max_tokens_per_pack=128",
    "alarms.limits.answers-cut.share=0.4",  # it ends an answer of 12 ids five times in six
    "alarms.limits.large-steps.kl=0.2",  # an untrained model of 67 words moves far
)


class Engine:
    """Answers requests with samples of its own copy of the model; methods are there to be spoilt."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())  # as vLLM on CPU
        self.version = Version(-1, -1)
        self.random = torch.Generator().manual_seed(0)
        self._waiting: list[tuple[Generate, asyncio.Future[Generated]]] = []

    # ------------------------------------------------------------ weights

    def load(self, version: Version, manifest: Manifest, view: memoryview, probe_ids: list[int]) -> WeightStatus:
        self.apply(dict(tensors(manifest, view)))
        self.version = version
        return WeightStatus(0, 0, version, digest(view), probe_ids, self.probe(probe_ids))

    @torch.no_grad()
    def apply(self, weights: dict[str, torch.Tensor]) -> None:
        parts = {
            part.name: part.tensor
            for name, each in self.model.named_parameters()
            for part in in_files(self.model.config.model_type, name, each, Placement(tuple(each.shape)))
        }
        for name, tensor in weights.items():
            parts[name].copy_(tensor)

    @torch.no_grad()
    def probe(self, ids: list[int]) -> list[float]:
        logits = self.model(torch.tensor([ids])).logits[0, :-1]
        logp: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return logp

    # ------------------------------------------------------------ requests

    async def generate(self, request: Generate) -> Generated:
        """Together with all others that are asked for in the same moment."""
        if not self._waiting:
            self._answer_all(turns=50)
        answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        return await answer

    def _answer_all(self, turns: int) -> None:
        """After so many turns of the loop: who is asked with whom must not depend on the machine."""
        if turns:
            asyncio.get_running_loop().call_soon(self._answer_all, turns - 1)
            return

        waiting, self._waiting = self._waiting, []
        found = self.sample([request for request, _ in waiting])
        for (request, answer), (ids, logp) in zip(waiting, found, strict=True):
            columns = self.columns(ids, logp)
            reason = "stop" if ids[-1] in STOPS else "length"
            generated = Generated(
                request_id=request.request_id,
                session=request.session,
                timeline=self.version.timeline,
                columns=columns,
                finish_reason=reason,
                tokens_generated=len(columns["token_ids"]),
                generator=0,
            )
            answer.set_result(generated)

    def columns(self, ids: list[int], logp: list[float]) -> dict[str, np.ndarray]:
        return {
            "token_ids": np.array(ids, np.int32),
            "logp_behavior": np.array(logp, np.float32),
            "policy_version": np.full(len(ids), self.version.n, np.int32),
        }

    @torch.no_grad()
    def sample(self, requests: list[Generate]) -> list[tuple[list[int], list[float]]]:
        """Ids and their log-probabilities, one token of all requests at a time."""
        ids = [request.prompt_ids.tolist() for request in requests]
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        for _ in range(LENGTH):
            open_ = [i for i, (mine, _) in enumerate(found) if not mine or mine[-1] not in STOPS]
            if not open_:
                break
            logits = self.logits([ids[i] for i in open_])  # (open, V)
            for i, row in zip(open_, logits, strict=True):
                token, logp = self.draw(row, requests[i])
                ids[i].append(token)
                found[i][0].append(token)
                found[i][1].append(logp)
        return found

    def logits(self, ids: list[list[int]]) -> torch.Tensor:
        """(n, V) behind each of the contexts."""
        lengths = torch.tensor([len(each) for each in ids])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in ids], batch_first=True)
        logits: torch.Tensor = self.model(padded).logits  # causal: what stands behind a context does not matter
        return logits[torch.arange(len(ids)), lengths - 1]

    def draw(self, logits: torch.Tensor, request: Generate) -> tuple[int, float]:
        logp = (logits / max(request.temperature, 1e-6)).log_softmax(-1)
        token = int(torch.multinomial(logp.exp(), 1, generator=self.random))
        return token, float(logp[token])


class Game:
    """Two turns; each earns the share of even ids in it, and more than half of them in one is success."""

    last_turn = 2

    def __init__(self) -> None:
        self.task = 0
        self.turns = 0
        self.success = False

    async def reset(self, task: int) -> list[ChatMessage]:
        self.task = task
        return [ChatMessage("user", " ".join(str(11 + (7 * task + place) % 50) for place in range(6)))]

    async def step(self, action: str, *, truncated: bool = False) -> Step:
        ids = [int(word) for word in action.split()]
        reward = self.judge(ids)
        self.turns += 1
        self.success |= reward > 0.5

        done = self.turns == self.last_turn
        answer = [] if done else [ChatMessage("user", "20 21 22")]
        return Step(answer, reward, done, success=self.success, info=self.info())

    def info(self) -> dict[str, float]:
        """Every answer can be used; two types of tasks."""
        return {"invalid_share": 0.0, f"success_{self.task % 2}": float(self.success)}

    def judge(self, ids: list[int]) -> float:
        return sum(each % 2 == 0 for each in ids) / len(ids)

    async def close(self) -> None:
        pass


class Lab:
    """One run of `steps`. `raised`: (step, name) of every alarm; of a run that was stopped the last one stopped it."""

    def __init__(self, folder: Path, *overrides: str, steps: int = 3, first_step: int = 0) -> None:
        self.config: Config = load_config(None, [*SETTINGS, f"steps={first_step + steps}", *overrides])
        self.folder = folder
        self.run = SimpleNamespace(config=self.config, model_folder=folder, untied=True)
        self.overrides = overrides
        self.steps = steps
        self.last_step = first_step + steps
        self.step = self.first_step = first_step
        self.raised: list[tuple[int, str]] = []
        self._until = ""
        self.alarms = Alarms(self.config.alarms, self._heard)

        torch.manual_seed(0)
        self.trainer = Trainer(self.config, folder, last_step=first_step + steps)
        self.guards = StepGuards(self.trainer, self.config, self.alarms, first_step=first_step)
        self.exact = ExactCheck(self.trainer.policy, self.config, self.alarms)
        exported = self.trainer.policy.export()
        self.manifest = Manifest.layout([(name, placement.shape, "float32") for name, _, placement in exported])
        self.engine = Engine(folder)
        self.environment: Callable[[], Any] = Game
        self.updater = UpdaterCore(
            generators=1, rolling=False, tolerance=tolerance(self.config), probe=self.config.weights.probe
        )

        rules = Rules.of(self.config, TASKS, first_step)
        self.core = BrokerCore(rules)
        self.broker_guards = BatchGuards(rules, self.alarms)
        self.core.server_joined(0, 0, 64, 0.0)
        self._tickets: list[Ticket] = []
        self._batch_parts: dict[int, BatchPart] = {}

    # ------------------------------------------------------------ the run

    def continued(self, *, optimizer: bool = True, journal: dict[str, Any] | None = None) -> Lab:
        """A resume of this run, at its end."""
        lab = Lab(self.folder, *self.overrides, steps=self.steps, first_step=self.core.n)
        lab.trainer.policy.load_state_dict(self.trainer.policy.state_dict())
        if optimizer:
            lab.trainer.optimizer.adamw.load_state_dict(self.trainer.optimizer.adamw.state_dict())
        lab.core = BrokerCore(lab.core.rules)
        lab.core.restore(journal or self.core.snapshot())
        lab.broker_guards.restored(lab.core)
        lab.core.server_joined(0, 0, 64, 0.0)
        return lab

    def train(self, until: str = "") -> list[str]:
        """Names of the alarms raised, in order. The run ends with its steps, or when the alarm `until` is raised."""
        self._until = until
        learner = SimpleNamespace(
            config=self.config,
            policy=self.trainer.policy,
            trainer=self.trainer,
            guards=self.guards,
            exact=self.exact,
            token_log=SimpleNamespace(batch=lambda batch_part: None, write_batch=lambda: None),
            turns={},
            take_device=lambda client: None,
            take_changes=lambda client, publisher, n: None,
            publish=self._publish_version,
            export=lambda step: None,
        )

        try:
            train(cast(Any, learner), cast(Any, self))
        except RunAlarm as alarm:
            self.raised.append((self.step, alarm.name))
        except RunStopped:
            pass
        return [name for _, name in self.raised]

    def _publish_version(self, publisher: Any, client: object, n: int, batch: BatchPart | None = None) -> None:
        publisher.publish(n, batch)
        self.note_version(client, n)

    def note_version(self, client: object, n: int) -> None:
        """What the learner keeps of a version for a replay."""

    def _heard(self, name: str, _detail: str) -> None:
        self.raised.append((self.step, name))
        if name == self._until:
            raise RunStopped(name)

    # ------------------------------------------------------------ what the learner's client is

    def version(self, n: int) -> Version:
        return Version(int(self.first_step > 0), n)

    def batches(self) -> Iterator[BatchPart]:
        for step in range(self.first_step, self.first_step + self.steps):
            self.step = step
            self._carry_out(self.core.batch_requested(step, 0.0))
            while step not in self._batch_parts:
                self.play()
            batch_part = self._batch_parts.pop(step)
            bound = self.config.rollout.staleness_bound
            check_batch_part(batch_part, step=step, rank=0, timeline=self.core.timeline, staleness_bound=bound)
            yield batch_part

    def publish(self, n: int, pieces: Iterable[Piece], probe_ids: list[int], probe: list[float]) -> bool:
        version = self.version(n)
        slot = memoryview(bytearray(self.manifest.total_bytes))
        write(slot, self.manifest, pieces)
        self.updater.publish(0.0, version, digest(slot), list(probe_ids), list(probe))
        status = self.engine.load(version, self.manifest, self.arrived(slot), list(probe_ids))
        for action in self.updater.status(0.0, status):
            if isinstance(action, Mismatch):
                raise RunAlarm("weights-differ", action.message)
        self._carry_out(self.core.published(version, 0.0))
        while self.config.rollout.alpha and self._tickets:  # rollout does not wait for the learner
            self.play()
        return True

    def arrived(self, slot: memoryview) -> memoryview:
        """What the channel brings of a slot."""
        return slot

    def report(self, batch_part: BatchPart, values: dict[str, float], histograms: dict[str, list[float]]) -> None:
        self.metrics = values

    to_be_saved = None

    def checkpoint_due(self, n: int) -> bool:
        return False

    def finish(self) -> None:
        pass

    def span(self, name: str) -> AbstractContextManager[None]:
        return NO_TRACE.span(name, self.step)

    # ------------------------------------------------------------ broker and environment server

    def play(self) -> None:
        """Every ticket that is out, to its end."""
        tickets, self._tickets = self._tickets, []
        assert tickets, "the broker waits for nothing"

        async def episodes() -> list[Trajectory]:
            context = EpisodeContext(self.config, tokenizer(), self.engine.generate)
            runs = [run_episode(each, self.environment, each.task_index, context) for each in tickets]
            return await asyncio.gather(*runs)

        for ticket, trajectory in zip(tickets, self.delivered(asyncio.run(episodes())), strict=True):
            self.end(ticket, trajectory)

    def delivered(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """What the environment server sends of them."""
        return trajectories

    def assembled(self, batch_part: BatchPart) -> BatchPart:
        """What the broker sends of a batch."""
        return batch_part

    def end(self, ticket: Ticket, trajectory: Trajectory) -> None:
        newest = Version(self.core.timeline, self.core.groups.e)
        if wrong := fault(trajectory, self.core.ticket(ticket.ticket_id), newest, VOCAB):
            self._carry_out(self.core.refused(ticket.ticket_id, wrong, 0.0))
        else:
            self.broker_guards.rewarded([trajectory.unrewarded])
            self._carry_out(self.core.finished(ticket.ticket_id, outcome_of(trajectory), 0.0))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case IssueTicket(_, ticket):
                    self._tickets.append(ticket)
                case EmitBatch():
                    self.broker_guards.batch(action, self.core.stats)
                    (batch_part,) = make_batch_parts(action, self.core.timeline, 1)
                    self._batch_parts[action.step] = self.assembled(batch_part)
                case GroupRecord():
                    self.broker_guards.ended(action)
                case EvalReport():
                    self.broker_guards.evaluated(action)
                case StopRun(reason):
                    raise RunStopped(reason)


def tokenizer() -> IdTokenizer:
    plain = IdTokenizer()
    plain.stop_ids = list(STOPS)
    return plain
