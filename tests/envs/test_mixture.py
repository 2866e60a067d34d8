"""Several environments in one run: weights, limits, labels, held-out tasks, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.mixture import MOST_TASKS, MixtureFamily, alternating, shares
from envs.registry import validate_env
from rl.config.schema import ConfigError, load_config
from tests.envs.playing import episode, gold_steps, with_family

MEMBERS = (
    "env.options.members={sums: {env: math, weight: 3, max_turns: 1, max_tokens: 24, eval_tasks: 2},"
    " noise: {env: synthetic, max_turns: 2, eval_temperature: 1, options: {tasks: 10, eval_tasks: 4, turns: 2}}}"
)
MIXTURE = ["env.name=mixture", "env.max_turns=4", MEMBERS]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 5000), st.floats(0.1, 9)), min_size=1),
    st.none() | st.integers(50, 3000),
)
@example({"a": (1, 1.0), "b": (1, 9.0), "c": (1, 10.0), "d": (4977, 0.1)}, None)  # a pass of them all is too long
def test_shares_are_the_weights_and_every_task_occurs(members: dict[str, tuple[int, float]], total: int | None) -> None:
    sizes = {name: size for name, (size, _) in members.items()}
    weights = {name: weight for name, (_, weight) in members.items()}
    counts = shares(sizes, weights, total)
    scale = min(count / weights[name] for name, count in counts.items())

    for name, count in counts.items():
        assert count >= 1 and abs(count - weights[name] * scale) <= 1 + weights[name] / min(weights.values())
        assert total is not None or count >= sizes[name] or sum(counts.values()) >= MOST_TASKS
    if total is not None:
        assert total <= sum(counts.values()) <= total + len(counts)


def test_held_out_tasks_alternate() -> None:
    assert alternating({"a": 3, "b": 1}) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]


def test_tasks_belong_to_the_members_by_weight_and_episodes_are_theirs() -> None:
    async def play(family: MixtureFamily) -> None:
        counts = Counter(family.task("train", index).label for index in range(family.task_count("train")))
        assert counts == {"sums": 10_000, "noise": 3_334}
        assert [family.task("eval", index).label for index in range(6)] == ["sums", "noise", "sums", *["noise"] * 3]

        (step,) = await gold_steps(family, family.task("train", 5))
        assert step.success and {"sums/correct", "sums/boxed"} <= set(step.info)

        _, steps, environment = await episode(family, family.task("eval", 1), ["a b", "c"])
        assert [step.done for step in steps] == [False, True]
        terms = environment.terms  # type: ignore[attr-defined]
        assert (terms.label, terms.max_turns, terms.max_tokens, terms.eval_temperature) == ("noise", 2, None, 1.0)

    with_family(play, *MIXTURE)


def test_a_dry_run_counts_the_tasks_of_members_that_say_how_many() -> None:
    member = "{env: reasoning_gym, options: {dataset: chain_sum, tasks: 40, eval_tasks: 8}}"
    games = "{env: gymnasium, weight: 3, options: {id: FrozenLake-v1, tasks: 30}, eval_tasks: 4}"
    config = load_config(
        None, ["env.name=mixture", f"env.options.members={{a: {member}, b: {games}}}", "eval.tasks=12"]
    )
    assert validate_env(config, dry=True)[:2] == validate_env(config)[:2] == (160, 12)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ("{env: maths}", "did you mean 'math'"),
        ("{env: mixture}", "is a mixture itself"),
        ("{env: tool_loop}", "members.a.env='tool_loop': its agent owns the loop"),
        (
            "{env: math, options: {sauce: x}}",
            "unknown key 'env.options.members.a.options.sauce'",
        ),
        ("{env: math, weight: 0}", "members.a.weight=0"),
        ("{env: math, max_turns: 9}", "env.max_turns=4"),
        ("{env: math, max_tokens: 9000}", "sampling.max_tokens=256"),
        ("{env: swe, max_turns: 1, options: {source: x.jsonl}}", "members.a.max_turns=1"),
    ],
)
def test_a_member_that_does_not_fit_is_named(member: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate_env(load_config(None, ["env.name=mixture", "env.max_turns=4", f"env.options.members={{a: {member}}}"]))


def test_a_name_that_metrics_cannot_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="no name for metrics"):
        validate_env(load_config(None, ["env.name=mixture", "env.options.members={a/b: {env: math}}"]))
