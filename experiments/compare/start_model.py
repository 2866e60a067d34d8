"""The model that both sides start from: small, warm-started on demonstrations once, kept in Fresco's cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

from tokenizers import Tokenizer

from experiments.compare import tasks
from experiments.compare.tasks import PIECE, Task
from launch.warm_start.sft import Example, SupervisedOptions, progress_report, train_supervised
from launch.warm_start.tiny import TinyRecipe, new_model
from launch.warm_start.word_tokenizer import TURN_END, build_tokenizer, save_tokenizer
from rl.store.made_once import cache_folder, digest, made_once, to_stderr
from rollout.episodes.environment import ChatMessage
from rollout.episodes.tokenizer import ChatTokenizer

_PROMPT_TOKENS = 64
_SHORT = 16
_WHOLE = 8
"""Where a task has a long tail, one demonstration in `_WHOLE` is of it. The others think down from `_SHORT` at most:
what comes after thinking is learnt at a fraction of the cost."""


def ensure_start_model(task: Task) -> Path:
    """The folder of the start model, which is made first if it is not there."""
    recipe = TinyRecipe(max_length=task.max_tokens + _PROMPT_TOKENS)
    fingerprint = digest(f"{astuple(task)} {recipe.model_dump_json()}", __file__, tasks.__file__)
    return made_once(cache_folder() / f"compare-{fingerprint}", lambda draft: _make(task, recipe, draft))


def _make(task: Task, recipe: TinyRecipe, folder: Path) -> None:
    corpus = [text for question, answer in task.questions(0)[:1000] for text in (question, f".\\boxed{{{answer}}}")]
    corpus.append("".join(f"#{count}" for count in range(1, task.thinking + 1)))
    words = build_tokenizer(corpus, PIECE)
    folder.mkdir()
    save_tokenizer(words, folder, recipe.max_length)
    model = new_model(recipe, words)
    model.save_pretrained(folder)  # ChatTokenizer reads the end of a turn from it

    to_stderr(f"start model of task {task.name!r}: warm start of {task.sft_steps} steps")
    options = SupervisedOptions(task.sft_steps, recipe.sft_lr, recipe.sft_warmup_steps, parts=task.sft_parts)
    report = progress_report(to_stderr, task.sft_steps, every=100)
    train_supervised(model, _demonstrations(task, folder, words), options, report)
    model.save_pretrained(folder)


def _demonstrations(task: Task, folder: Path, words: Tokenizer) -> Callable[[int], list[Example]]:
    tokenizer = ChatTokenizer(folder)
    end = words.get_vocab()[TURN_END]
    short = replace(task, thinking=min(task.thinking, _SHORT))
    asked = list(zip(task.questions(-1), short.questions(-1), strict=True))

    def next_examples(step: int) -> list[Example]:
        rng = random.Random(step)
        examples = []
        for place, (whole, brief) in enumerate(rng.sample(asked, task.sft_batch)):
            question, _ = whole if place % _WHOLE == 0 else brief
            prompt = tokenizer.prompt([ChatMessage("user", question)])
            examples.append(Example(prompt, [*words.encode(task.demonstrate(question, rng)).ids, end]))
        return examples

    return next_examples
