"""The seam "model": nobody else knows an architecture, and a model in one file of its own is trained through it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from algos.registry import make_loss
from rl.config.schema import LearnerConfig, load_config
from rl.learner.credit import Minibatch
from rl.learner.guards import ExactCheck
from rl.learner.publish import probe_logp
from rl.learner.trainer import Optimizer
from rl.learner.update import accumulate_gradients, with_logp
from rl.models.packing import Pack
from rl.models.protocol import Exported, ModelOptions, Placement, PolicyModel, PolicyOutput
from rl.observe.alarms import Alarms
from tests.rl.learner.tiny_policies import VOCAB, algorithm_of, make_batch_parts, packs_of

ROOT = Path(__file__).parents[3]
OF_ARCHITECTURES = re.compile(
    r"named_parameters\(|Batch part\(0\)|DTensor|full_tensor|to_local\(|fully_shard|attn_implementation"
    r"|get_(out|in)put_embeddings|get_decoder|\.model\.(config|named|parameters)|embed_tokens"
)
OF_SAMPLES = re.compile(r"cu_seq_?len|position_ids=|rl\.models\.(layout|head|packed_attention)")


def sources(*folders: str) -> dict[str, str]:
    """Text of the modules of these folders by path, without comments behind code and docstrings."""
    found = {}
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        lines = re.sub(r'"""(?s:.*?)"""', "", path.read_text()).splitlines()
        found[str(path.relative_to(ROOT))] = "\n".join(line.split("  # ")[0] for line in lines)
    return found


@pytest.mark.parametrize("what", [OF_ARCHITECTURES, OF_SAMPLES], ids=["architectures", "how samples stand in a pack"])
def test_nobody_else_knows(what: re.Pattern[str]) -> None:
    # An engine has a model of its own; the warm start makes one of transformers, and its rows have positions.
    elsewhere = ("rl/models/", "rl/moved.py", "rollout/generator/engines/", "launch/warm_start/")
    modules = {path: code for path, code in sources("rl", "rollout", "launch", "envs", "algos").items()}
    outside = {path: code for path, code in modules.items() if not path.startswith(elsewhere)}
    assert len(outside) > 100
    assert not {path: match.group() for path, code in outside.items() if (match := what.search(code))}
    assert any(what.search(code) for path, code in modules.items() if path.startswith("rl/models/"))


def test_who_loads_names_a_class_and_all_others_the_protocol() -> None:
    classes = re.compile(r"from rl\.models\.(policy|critic) import .*\b(Policy|Critic)\b")
    users = [path for path, code in sources("rl", "rollout", "launch").items() if classes.search(code)]
    loaders = ["rl/learner/trainer.py", "rollout/teacher/scoring.py"]
    assert sorted(path for path in users if not path.startswith("rl/models/")) == loaders


class Bigram(nn.Module):
    """A model that is none of transformers': the logits after a token are a row of its only matrix."""

    families: Iterable[str] = ("bigram",)
    reads: Collection[str] = ()

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: DeviceMesh | None = None,
        device: str = "cpu",
        options: ModelOptions = ModelOptions(),
    ) -> Bigram:
        return cls().to(device)

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "table", self.table

    def export(self, *, untie: bool = True) -> Iterator[Exported]:
        yield Exported("table", self.table.detach(), Placement((VOCAB, VOCAB), 0))

    def adapters(self) -> Iterator[Exported]:
        return iter(())

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.table.detach()) for name in names)

    def forward(self, pack: Pack, *, temperature: float = 1.0, entropy_gradient: bool = False) -> PolicyOutput:
        layout = pack.laid_out().layout
        assert layout is not None
        before = pack.token_ids.index_select(0, layout.targets - 1)
        logp = (self.table[before] / temperature).log_softmax(-1)  # (S, V)
        chosen = logp.gather(1, pack.token_ids.index_select(0, layout.targets)[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(1)

        zeros = torch.zeros(pack.tokens)
        found = [zeros.index_copy(0, layout.targets, each) for each in (chosen, entropy)]
        return PolicyOutput(found[0], found[1] if entropy_gradient else found[1].detach())


def test_a_model_of_its_own_is_trained_checked_and_published_through_the_protocol() -> None:
    policy: PolicyModel = Bigram.load("anywhere")
    (batch_part,) = make_batch_parts(1)
    packs = with_logp(policy, packs_of(batch_part), "logp_behavior", temperature=0.7)
    config = load_config(None, ["alarms.exact=1e-6", "sampling.temperature=0.7", "rollout.alpha=0"])
    packs = [pack.with_columns(staleness=torch.zeros_like(pack.staleness)) for pack in packs]
    exact = ExactCheck(policy, config, Alarms(config.alarms, lambda *_: None))
    found = exact.batch(0, [Minibatch(packs, batch_part.loss_tokens)])
    assert found["exact/max"] == 0 and found["exact/tokens"] == batch_part.loss_tokens

    probe = [1, 2, 3, 4]
    before = probe_logp(policy, probe)
    optimizer = Optimizer(policy.trainable(), LearnerConfig(lr=0.01), last_step=2)
    tokens = batch_part.loss_tokens
    stats = accumulate_gradients(
        policy, packs, algorithm_of(make_loss("grpo", {})), temperature=0.7, global_tokens=tokens
    )
    norm, _ = optimizer.step(0)
    assert stats.metrics()["loss/kl_behavior"] == pytest.approx(0, abs=1e-12) and norm > 0
    assert len(before) == 3 and probe_logp(policy, probe) != before
    assert {name: placement.shape for name, _, placement in policy.export()} == {"table": (VOCAB, VOCAB)}
