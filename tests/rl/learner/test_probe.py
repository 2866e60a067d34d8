"""The probe is text: of the model's own tokenizer, where that knows its words, and of the run once it has a batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rl.config.schema import load_config
from rl.learner import publish
from rl.learner.publish import Publisher, probe_length, probe_prompt
from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from tests.conftest import MakeRun
from tests.rl.learner.tiny_policies import VOCAB, make_batch_parts, save_tiny


def saved(folder: Path, words: list[str]) -> Path:
    vocabulary = {word: index for index, word in enumerate(["?", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def test_it_is_text_where_the_tokenizer_knows_words(tmp_path: Path) -> None:
    words = [word for word, _ in Whitespace().pre_tokenize_str(publish._PROBE_TEXT)]
    ids = probe_prompt(saved(tmp_path, words), 1000, 64)
    vocabulary = ["?", *dict.fromkeys(words)]
    assert [vocabulary[index] for index in ids] == words[:64]


def test_a_tokenizer_that_knows_none_of_it_gives_ids_of_the_whole_vocabulary(tmp_path: Path) -> None:
    ids = probe_prompt(saved(tmp_path, ["go", "to"]), 1000, 64)
    assert ids == probe_prompt(None, 1000, 64)
    assert len(set(ids)) == 64 and max(ids) < 1000 and max(ids) - min(ids) > 800


@pytest.mark.parametrize(("device", "heads"), [("cpu", 1), ("cuda", 0)])
def test_a_tied_head_is_sent_where_engines_have_one_of_their_own(
    tmp_path: Path, make_run: MakeRun, device: str, heads: int
) -> None:
    policy = Policy.load(save_tiny(tmp_path), None, "cpu")
    names = [name for name, _, _ in publish.weight_entries(policy, make_run(device=device))]
    assert policy.tied and names.count("lm_head.weight") == heads and "model.embed_tokens.weight" in names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_fits_into_a_short_context(dtype: str) -> None:
    config = load_config(None, [f"generator.dtype={dtype}", "generator.max_model_len=40", "sampling.max_tokens=8"])
    assert probe_length(config, 0) == 39
    assert probe_length(config, 1000) <= 39


class Link:
    """Keeps what the learner would say: for each version the probe's ids and log-probabilities."""

    def __init__(self, *overrides: str) -> None:
        self.config = load_config(None, [*overrides])
        self.run = SimpleNamespace(config=self.config, model_folder=None, untied=True)
        self.said: dict[int, tuple[list[int], list[float]]] = {}
        self.newest = 0  # that the generators have from before

    def span(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self, n: int, _pieces: object, ids: Sequence[int], logp: Sequence[float]) -> bool:
        self.said[n] = [*ids], [*logp]
        return n >= self.newest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def publisher(folder: Path, client: Any) -> Publisher:
    return Publisher(Policy.load(folder), client)


def test_from_the_first_batch_on_it_is_the_runs_own_text(folder: Path) -> None:
    first, second = (make_batch_parts(1, groups=8, seed=seed)[0] for seed in range(2))
    client = Link()
    rank = publisher(folder, client)
    rank.publish(0)
    rank.publish(1, first)
    rank.publish(2, second)

    own = first.columns["token_ids"][:64].tolist()
    assert [ids for ids, _ in client.said.values()] == [probe_prompt(None, VOCAB, 64), own, own]
    ids = torch.tensor(own)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]  # (P - 1, V)
    assert client.said[2][1] == pytest.approx(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-4)


@pytest.mark.parametrize(("state", "least", "most"), [(0.0, 0.0, 1e-5), (0.1, 0.01, 100.0)])
def test_a_model_whose_samples_leak_into_the_next_of_a_pack_differs_from_an_engine(
    folder: Path, state: float, least: float, most: float
) -> None:
    """Which computes the probe alone. The state is carried along a pack, as convolutions and recurrences do."""
    policy = Policy.load(folder)
    policy.decoder.norm.register_forward_hook(lambda _module, _inputs, out: out + state * out.cumsum(1))
    ids = probe_prompt(None, VOCAB, 16)
    with torch.no_grad():
        alone = policy(sequence_pack(ids)).logp[1:]
    assert least <= (torch.tensor(publish.probe_logp(policy, ids)) - alone).abs().max() <= most


def test_a_rank_without_a_part_of_the_first_batch_keeps_what_it_has(folder: Path) -> None:
    client = Link()
    rank = publisher(folder, client)
    rank.publish(0)
    (batch,) = make_batch_parts(1)
    rank.publish(1, replace(batch, members=[], lengths=[], turn_starts=[]))
    assert client.said[1] == client.said[0]


def test_without_a_probe_none_is_made_of_a_batch(folder: Path) -> None:
    client = Link("weights.probe=false")
    rank = publisher(folder, client)
    rank.publish(0)
    rank.publish(1, make_batch_parts(1)[0])
    assert client.said == {0: ([], []), 1: ([], [])}


@pytest.mark.parametrize(
    ("learner", "engine", "later"),
    [("float32", "float32", 16), ("bfloat16", "bfloat16", 64), ("bfloat16", "float32", 64)],
)
def test_the_first_versions_have_a_long_one_and_later_ones_what_rounding_asks_for(
    folder: Path, learner: str, engine: str, later: int
) -> None:
    client = Link(f"model.dtype={learner}", f"generator.dtype={engine}")
    rank = publisher(folder, client)
    (batch,) = make_batch_parts(1, groups=8)
    for n in range(5):
        rank.publish(n, batch if n else None)
    assert [len(ids) for ids, _ in client.said.values()] == [64, 64, 64, later, later]
    assert [len(logp) for _, logp in client.said.values()] == [63, 63, 63, later - 1, later - 1]


def test_versions_that_the_generators_have_already_do_not_count_as_the_first(folder: Path) -> None:
    """After a learner's death it trains again what it had published."""
    client = Link("model.dtype=float32", "generator.dtype=float32")
    client.newest = 4
    rank = publisher(folder, client)
    for n in range(9):
        rank.publish(n)
    assert [len(ids) for ids, _ in client.said.values()] == [64] * 7 + [16] * 2
