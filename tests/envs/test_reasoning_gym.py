"""Data sets of reasoning-gym: tasks that differ, gold answers that earn, answers that hang the scoring."""

from __future__ import annotations

import pytest

from envs.reasoning_gym.environment import ReasoningGymFamily
from envs.registry import make_family
from rl.config.schema import ConfigError, load_config
from rollout.episodes.environment import RewardFailed
from tests.envs.playing import episode, gold_steps, with_family

NAME = "env.name=reasoning_gym"


def test_gold_earns_other_answers_do_not_and_one_that_hangs_the_scoring_masks_its_sample() -> None:
    """`countdown` hands an answer to sympy, which works on a tower of powers without end: that is no zero."""

    async def play(family: ReasoningGymFamily) -> None:
        task = family.task("train", 0)
        for wrong in ("", "17", "<answer>", "<answer></answer>", "<answer>no number</answer>"):
            _, (step,), _ = await episode(family, task, [wrong])
            assert not step.success and step.reward is not None and step.reward < 0.05, wrong
            assert step.info["answered"] == float("</answer>" in wrong)
        with pytest.raises(RewardFailed, match="score_answer"):
            await episode(family, task, ["<answer>9**9**9**9</answer>"])

        for index in range(4):
            (step,) = await gold_steps(family, family.task("train", index))
            assert (step.reward, step.success, step.done) == (1.0, True, True)

    with_family(play, NAME, "env.options.dataset=countdown", "env.options.request_deadline_s=10")


def test_held_out_tasks_are_no_training_tasks_and_a_task_is_the_same_everywhere() -> None:
    """The package draws entry i from seed + i: a data set whose seed is one higher is the same one, moved by one."""

    async def questions(family: ReasoningGymFamily) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for split in ("train", "eval"):
            openings = [(await episode(family, family.task(split, index), []))[0] for index in range(40)]
            found[split] = [opening[-1].content for opening in openings]
        return found

    options = (NAME, "env.options.dataset=chain_sum", "env.options.config={min_digits: 4, max_digits: 6}")
    asked = with_family(questions, *options)
    assert len(set(asked["train"])) == 40 and not set(asked["train"]) & set(asked["eval"])
    assert asked == with_family(questions, *options)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.options.dataset=chain_sums", "did you mean 'chain_sum'"),
        ("env.options.config={min_terms: -1}", "min_terms"),
        ("env.options.config={unknown: 1}", "unknown"),
    ],
)
def test_what_the_package_does_not_know_is_refused_at_once(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_family(load_config(None, [NAME, "env.options.dataset=chain_sum", override]))
