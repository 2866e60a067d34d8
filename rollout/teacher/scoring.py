"""Log-probabilities under a teacher: of a model in this process, or of one at an endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rl.config.algo import is_endpoint
from rl.config.failures import EndsRun
from rl.wire.messages import ScoreTokens
from rl.wire.run import RunFile
from rollout.broker.validation import HIGHEST_LOGP

Score = Callable[[Sequence[ScoreTokens]], list[np.ndarray]]
"""Of each sequence the log-probabilities of the tokens that are asked for, (K,) float32."""
_AT_ONCE = 16  # requests to an endpoint
_TRIES = 4
_LEAST = -100.0  # nats: an endpoint may say -inf, which no loss can follow
_WANTED = "the log-probability of each token of the prompt (vLLM's prompt_logprobs)"


class TeacherRefused(EndsRun):
    """The teacher that `algo.teacher` names cannot score this student's tokens."""

    one_line = True


def make_score(run: RunFile) -> Score:
    """Raises TeacherRefused, and what loading a model raises."""
    teacher = run.config.algo.teacher
    assert teacher is not None
    if is_endpoint(teacher):
        return Endpoint(run)
    return stand_in if run.teacher_folder is None else model(run)


def stand_in(asked: Sequence[ScoreTokens]) -> list[np.ndarray]:
    """For runs without a model: a number for each id, always the same."""
    return [-1.0 - (each.token_ids[each.loss_mask != 0] % 8).astype(np.float32) / 8 for each in asked]


def model(run: RunFile) -> Score:
    """The model in `run.teacher_folder`, by the learner's own forward: packed, at the temperature of sampling."""
    import torch

    from rl.models.packing import sequence_pack
    from rl.models.policy import Policy
    from rl.models.protocol import ModelOptions

    settings = run.config.learner
    torch.set_num_threads(settings.threads)
    dtype = torch.float32 if run.config.model.dtype == "float32" else torch.bfloat16
    options = ModelOptions(
        dtype=dtype, logprob_chunk=settings.logprob_chunk, attention=settings.attention, compile=settings.compile
    )
    assert run.teacher_folder is not None
    policy = Policy.load(run.teacher_folder, None, run.device, options).requires_grad_(False).eval()
    for parameter in policy.parameters():  # never trained: there is no master copy
        parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def score(asked: Sequence[ScoreTokens]) -> list[np.ndarray]:
        masks = [torch.tensor(each.loss_mask != 0) for each in asked]
        pack = sequence_pack(*(each.token_ids.tolist() for each in asked)).with_columns(loss_mask=torch.cat(masks))
        logp = policy(pack.to(policy.device), temperature=run.config.sampling.temperature).logp.float().cpu()
        parts = logp.split([len(mask) for mask in masks])
        return [part[mask].numpy() for part, mask in zip(parts, masks, strict=True)]

    return score


class Endpoint:
    """`URL#NAME`: Completions with vLLM's `prompt_logprobs`, asked with token ids."""

    def __init__(self, run: RunFile) -> None:
        """Raises TeacherRefused for an endpoint that does not score the longest sequence that there can be."""
        from openai import OpenAI

        self._teacher = run.config.algo.teacher or ""
        url, _, self._model = self._teacher.partition("#")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = OpenAI(base_url=url, api_key=key, max_retries=_TRIES, timeout=run.config.timeouts.hang_s)
        self._pool = ThreadPoolExecutor(_AT_ONCE, "teacher")

        longest = run.config.generator.max_model_len
        self._one(ScoreTokens(0, np.zeros(longest, np.int32), np.ones(longest, np.uint8)))

    def __call__(self, asked: Sequence[ScoreTokens]) -> list[np.ndarray]:
        return list(self._pool.map(self._one, asked))

    def _one(self, asked: ScoreTokens) -> np.ndarray:
        from openai import OpenAIError

        ids: Any = asked.token_ids.tolist()
        try:
            answer = self._client.completions.create(
                model=self._model, prompt=ids, max_tokens=1, temperature=1.0, extra_body={"prompt_logprobs": 0}
            )
        except OpenAIError as error:
            raise TeacherRefused(f"algo.teacher={self._teacher!r} does not answer: {error}") from None

        try:
            told: Any = (answer.choices[0].model_extra or {})["prompt_logprobs"]
            places = np.flatnonzero(asked.loss_mask)
            said = [_LEAST if place == 0 else told[place][str(ids[place])]["logprob"] for place in places]
            found = np.array(said, np.float32)
        except (TypeError, KeyError, IndexError, AttributeError, ValueError):
            raise TeacherRefused(f"algo.teacher={self._teacher!r} does not tell {_WANTED}") from None
        if not (found <= HIGHEST_LOGP).all():  # nor is NaN
            wrong = found[~(found <= HIGHEST_LOGP)][0]
            raise TeacherRefused(f"algo.teacher={self._teacher!r} tells {wrong:g}, which is no log-probability")
        return np.maximum(found, np.float32(_LEAST))
