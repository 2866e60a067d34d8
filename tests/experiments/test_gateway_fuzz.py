"""Fuzzed agents over the templates of well-known models (`python -m experiments.gateway` plays ten thousand)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from experiments.gateway.agents import Agent
from experiments.gateway.fuzz import RecordingEngine, Report, check, play
from experiments.gateway.tokenizers import make_folder, template_names
from rl.config.schema import load_config
from rl.wire.messages import Ticket, TokenSequence, Version
from rollout.episodes.forest import Forest
from rollout.episodes.parsing import HermesParser, TurnReader
from rollout.episodes.session import Session
from rollout.episodes.thinking import Thinking
from rollout.episodes.tokenizer import ChatTokenizer
from rollout.episodes.turns import TurnSampler

SESSIONS = 12  # of each template


@pytest.mark.parametrize("name", template_names())
def test_every_trained_token_was_sampled_in_its_place(name: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_folder(name, tmp_path / name))
    report = Report()

    async def sessions() -> None:
        for seed in range(SESSIONS):
            await play(tokenizer, seed, report, "template" if seed % 4 == 0 else "keep")

    asyncio.run(sessions())
    assert not report.wrong, report.wrong
    assert report.trained_tokens > 500 and report.sequences > SESSIONS // 2 and report.read_tokens > 500


def played(tmp_path: Path, thinking: Thinking = "keep") -> tuple[list[TokenSequence], RecordingEngine]:
    chance = random.Random(5)
    tokenizer = ChatTokenizer(make_folder("qwen3", tmp_path / "qwen3"))
    config = load_config(None, ["generator.max_model_len=4096", "sampling.max_tokens=200"])
    engine = RecordingEngine(tokenizer, chance)
    sampler = TurnSampler(Ticket(1, 0, 0, 0, Version(0, 3)), config, tokenizer.stop_ids, engine.generate)
    session = Session(sampler, Forest(TurnReader(tokenizer, HermesParser()), thinking=thinking), grace_s=0)

    async def go() -> None:
        agent = Agent(session, chance, with_system=True, with_tools=True)
        for _ in range(3):
            await agent.play()
        await session.close()

    asyncio.run(go())
    return session.forest.sequences(), engine


def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    sequences, engine = played(tmp_path)
    assert not check(sequences, engine) and len(sequences) > 1

    for name, change in ("token_ids", 1), ("logp_behavior", -0.5), ("policy_version", 1):
        first = sequences[0]
        column = first.columns[name].copy()
        column[first.turns[0].start] += np.array(change, column.dtype)
        wrong = replace(first, columns=first.columns | {name: column})
        assert "were not sampled" in check([wrong], engine), name

    mask = sequences[0].loss_mask.copy()
    mask[0] = 1
    unmasked = replace(sequences[0], columns=sequences[0].columns | {"loss_mask": mask})
    assert "outside the turns" in check([unmasked], engine)
    assert check([sequences[0], sequences[0]], engine) == "a turn is trained twice"
