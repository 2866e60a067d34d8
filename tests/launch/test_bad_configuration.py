"""Bad configuration is one line that names the field, the value and the fix, before any process starts."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from pydantic import BaseModel
from transformers import DeepseekV3Config, Gemma2Config, GPT2Config, PreTrainedConfig

from launch import preflight
from launch.cli import main
from launch.gpus import Gpu, visible_gpus
from launch.plan import gpus_needed, make_plan
from launch.preflight import check, make_run
from launch.prepare import Prepared, check_model_is_trainable, needs_validation, validate
from rl.config.schema import Config, ConfigError, load_config
from rl.config.section import NoOptions
from rl.store.checkpoint_folder import Meta, begin, commit
from rollout.broker.core import BrokerCore
from rollout.broker.groups import Groups
from rollout.broker.hooks import BrokerHook
from rollout.broker.rules import Rules
from rollout.broker.tasks import Oldest, ShuffledTasks
from rollout.episodes.hooks import EpisodeHook

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GIB = 1 << 30


class Unkept(Oldest):
    def __init__(self) -> None:
        self.order = lambda version: version


class Snapshot(ShuffledTasks):
    """As curricula were before."""

    state = None  # type: ignore[assignment]

    def snapshot(self) -> int:
        return self.cursor


class Opaque(ShuffledTasks):
    def state(self) -> Any:
        return random.Random(self.cursor)


class Forgetful(ShuffledTasks):
    def restore(self, state: int) -> None:
        """Begins anew."""


class Tuples(ShuffledTasks):
    def state(self) -> Any:
        return (self.cursor, self.tasks)

    def restore(self, state: Any) -> None:
        if not isinstance(state, tuple):
            raise ValueError("not from a list")


class UnkeptHook(BrokerHook):
    def __init__(self, options: NoOptions, groups: Groups) -> None:
        super().__init__(options, groups)
        self.wanted = lambda server: server > 0


class Unmade(EpisodeHook):
    def __init__(self, *parts: object) -> None:
        raise ValueError("it never can")


@pytest.fixture(autouse=True)
def prepared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child of the preflight checks, in this process: a child for each case would import torch each time."""

    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        if needs_validation(config):
            validate(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)


BAD = [
    # (recipe, overrides, what the line must say)
    ("simulated", "steps=true", "steps=True"),
    ("simulated", "rollout.alpha=true", "rollout.alpha=True"),
    ("simulated", "env.options.turns=true", "env.options.turns=True"),
    ("simulated", "rollout.alpha=.inf", "rollout.alpha=inf"),
    (
        "math_cpu",
        "generator.options.own_process=false generator.tensor_parallel=2",
        "generator.options.own_process=false",
    ),
    ("simulated", "learner.lr=.nan", "learner.lr=nan"),
    ("simulated", "learner.eps=.inf", "learner.eps=inf"),
    ("simulated", "learner.betas=[2,3]", "learner.betas.0=2"),
    ("simulated", "learner.betas=[0.9]", "learner.betas"),
    ("simulated", "timeouts.heartbeat_s=100", "timeouts.heartbeat_s=100"),
    ("simulated", "timeouts.heartbeat_s=59", "timeouts.heartbeat_s=59"),
    ("simulated", "rollout.priority=nope", "freshest, oldest"),
    ("simulated", "rollout.priority=os:path", "no method 'issue'"),
    ("simulated", "rollout.priority=tests.launch.test_bad_configuration:Unkept", "the broker's log cannot keep"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Snapshot", "no method 'state'"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Opaque", "the broker's log cannot keep"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Forgetful", "makes it another one"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Tuples", "ValueError: not from a list"),
    ("simulated", "rollout.hooks=[hedgin]", "did you mean 'hedging'"),
    ("simulated", "rollout.hooks=[no.such:Hook]", "rollout.hooks='no.such:Hook' cannot be imported"),
    ("simulated", "rollout.hooks=[os:path]", "rollout.hooks='os:path' is no hook"),
    ("simulated", "rollout.hooks=hedging", "rollout.hooks='hedging': Input should be a valid list"),
    ("simulated", "rollout.hooks=[hedging,hedging]", "named twice"),
    ("simulated", 'rollout.hooks=[{"hedging":0.9}]', "write the plug-in's name, or {name: {option: value}}"),
    ("simulated", 'rollout.hooks=[{"hedging":{"quantile":2}}]', "rollout.hooks.hedging.quantile=2"),
    ("simulated", 'rollout.hooks=[{"hedging":{"quantil":0.5}}]', "did you mean 'quantile'"),
    (
        "simulated",
        'rollout.hooks=[{"turn_barrier":{"x":1}}]',
        "'rollout.hooks.turn_barrier.x'; there are none here",
    ),
    ("simulated", "rollout.hooks=[tests.launch.test_bad_configuration:UnkeptHook]", "the broker's log cannot keep"),
    ("simulated", "rollout.hooks=[tests.launch.test_bad_configuration:Unmade]", "cannot be made: it never can"),
    ("simulated", "rollout.turn_barrier=true", "write rollout.hooks=[turn_barrier]"),
    ("simulated", "rollout.hedge_quantile=0.9", "write rollout.hooks=[{hedging: {quantile: 0.95}}]"),
    ("simulated", "rollout.surplus=keep", "rollout.surplus was removed"),
    ("simulated", "chat.parser=vllm:nope", "no tool parser 'nope'"),
    ("agent_tools_cpu", "chat.parser=vllm:hermes+nope", "no reasoning parser 'nope'"),
    ("agent_tools_cpu", "chat.parser=vllm:+", "no parser is named"),
    ("simulated", "rollout.curriculum=nope", "shuffled, success"),
    ("simulated", "rollout.curriculum=os:path", "no method 'next'"),
    ("simulated", 'rollout.curriculum={"shuffled":{"a":1}}', "rollout.curriculum='shuffled'"),
    ("simulated", "generator.count=100000", "lower generator.count"),
    ("simulated", "env.servers=100000", "lower env.servers"),
    ("simulated", "learner.ranks=100000", "lower learner.ranks"),
    ("math_lora_cpu", 'model.lora={"serve":"adapter","targets":["lm_head"]}', "set model.lora.serve=merged"),
    ("simulated", "weights.slots=1000000", "lower weights.slots"),
    ("simulated", "weights.transport=shn", "did you mean 'shm'?"),
    ("simulated", "weights.transport=nccl", "goes from GPU to GPU, and device=cpu; set weights.transport=auto"),
    ("simulated", "weights.transport=ipc", "goes from GPU to GPU, and device=cpu; set weights.transport=auto"),
    ("simulated", "weights.transport=os:path", "names no rl.weights.channel.Channel"),
    ("simulated", "rollout.group_size=1000000000", "rollout.group_size"),
    ("simulated", "rollout.alpha=1e12", "lower rollout.alpha"),
    ("simulated", "model.path=/nonexistent", "model.path='/nonexistent'"),
    ("simulated", "model.path=../nonexistent", "model.path='../nonexistent'"),
    ("simulated", "rollout.groups_per_batch=1000000000", "rollout.groups_per_batch"),
    ("simulated", "learner.options.weight_bytes=1000000000000000", "weights.slots"),
    ("simulated", "steps=1e30", "steps="),
    ("simulated", "seed=-1", "seed=-1"),
    ("simulated", "seed=1e30", "seed="),
    ("simulated", "name=", "name=''"),
    ("simulated", "name=..", "name='..'"),
    ("simulated", "name=" + 300 * "x", "at most 200 bytes"),
    ("simulated", "name=a\x01b", "printable"),
    ("simulated", "runs=README.md", "runs='README.md'"),
    ("simulated", "resume=README.md", "resume='README.md'"),
    ("simulated", "resume=/nonexistent", "resume='/nonexistent'"),
    ("simulated", "rollout=5", "rollout=5"),
    ("simulated", "rollout..alpha=1", "'rollout..alpha'"),
    ("simulated", "=3", "key=value"),
    ("simulated", "env.name=os:path", "env.name='os:path'"),
    ("simulated", "network.transport=tcp network.host=no.such.host.invalid", "network.host='no.such.host.invalid'"),
    ("simulated", "algo.columns=[nope]", "algo.columns='nope'"),
    ("simulated", "algo.columns=[os:path]", "algo.columns='os:path'"),
    ("math_cpu", "algo.loss=os:path", "is no loss"),
    ("simulated", "algo.loss=os:path", "is no loss"),
    ("simulated", "algo.loss=grpoo", "algo.loss"),
    ("math_cpu", "algo.advantage=os:path", "is no advantage"),
    ("math_cpu", 'algo.shaping=["os:path"]', "is no shaping"),
    ("math_cpu", "algo.options.clip_high=true", "'clip_high'"),
    ("math_cpu", "algo.options.clip_high=.nan", "'clip_high'"),
    ("math_cpu", "model.tiny.nope=1", "model.tiny.nope=1"),
    ("math_cpu", "model.tiny.layers=0", "model.tiny.layers=0"),
    ("math_cpu", "model.path=/nonexistent", "model.path='/nonexistent'"),
    ("simulated", "learner.kind=fsdp model.warm_start.demonstrations=5", "has no demonstrator"),
    ("math_cpu", "generator.options.max_num_batched_tokens=1", "generator.options.max_num_batched_tokens=1"),
    ("math_cpu", "generator.options.max_num_batched_tokens=-5", "generator.options.max_num_batched_tokens=-5"),
    ("math_cpu", "generator.threads=100000", "generator.threads=100000"),
    ("math_cpu", "learner.threads=100000", "learner.threads=100000"),
    ("math_cpu", "learner.ranks=5000", "lower learner.ranks"),
    ("math_cpu", "sampling.temperature=1e-30", "sampling.temperature"),
    ("math_cpu", "eval.tasks=1000000000", "eval.tasks=1000000000"),
]


@pytest.mark.parametrize(("recipe", "overrides", "told"), BAD, ids=[f"{recipe} {each}" for recipe, each, _ in BAD])
def test_it_is_one_line_and_starts_nothing(
    recipe: str, overrides: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object, **options: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(ConfigError) as caught:
        check(load_config(EXPERIMENTS / f"{recipe}.yaml", [f"runs={tmp_path}", *overrides.split()]), dry=False)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def numbers(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, set[Any]]]:
    """Every number of the configuration, and of which types it may be."""
    for name, field in section.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from numbers(field.annotation, f"{path}{name}.")
        elif kinds & {int, float}:
            yield path + name, kinds


@pytest.mark.parametrize(("path", "kinds"), [pytest.param(*each, id=each[0]) for each in numbers(Config)])
def test_a_number_that_nothing_could_carry_or_wait_for_is_refused(path: str, kinds: set[Any]) -> None:
    """Found late: an integer that no message can carry, seconds that overflow a clock."""
    for absurd in (10**24, -(10**24)) if int in kinds else (1e300, -1e300):
        with pytest.raises(ConfigError) as caught:
            load_config(EXPERIMENTS / "simulated.yaml", [f"{path}={absurd}"])
        assert str(caught.value).startswith(f"{path}=") and "\n" not in str(caught.value)


def test_the_command_says_it_and_returns_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(EXPERIMENTS / "simulated.yaml"), f"runs={tmp_path}", "steps=true"]) == 2
    assert capsys.readouterr().err == "fresco: steps=True: a number is wanted here, not true or false\n"
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_runs_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").symlink_to(elsewhere)
    (tmp_path / "file").touch()
    for name in ("linked", "file"):
        with pytest.raises(ConfigError, match=f"name='{name}'"):
            check(load_config(EXPERIMENTS / "simulated.yaml", [f"runs={tmp_path}", f"name={name}"]), dry=False)
    assert not list(elsewhere.iterdir())


def folder(path: Path) -> None:
    path.mkdir()


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def circle(path: Path) -> None:
    path.write_text(f"base: {path.name}\n")


def wrong_base(path: Path) -> None:
    path.write_text("base: [a, b]\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("rollout.group_size=9", "rollout.group_size=9: its groups have 4; set it as it was"),
        ("rollout.redundant_episodes=1", "rollout.redundant_episodes=1: its groups have 0; set it as it was"),
        ("rollout.curriculum=success", "another rollout.curriculum than success"),
    ],
)
def test_a_checkpoint_that_the_broker_cannot_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, told: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of sockets, which no supervisor removes here
    recipe = EXPERIMENTS / "simulated.yaml"
    state = BrokerCore(Rules.of(load_config(recipe, []), train_tasks=1000)).snapshot()
    begin(tmp_path, 0)
    checkpoint = commit(tmp_path, Meta(0, 0, 2), msgspec.msgpack.encode(state), keep=1)

    resumed = [f"runs={tmp_path / 'runs'}", f"resume={checkpoint}"]
    make_run(check(load_config(recipe, [*resumed, "name=fits"]), dry=False), started=0.0)
    with pytest.raises(ConfigError) as caught:
        make_run(check(load_config(recipe, [*resumed, change]), dry=False), started=0.0)
    assert str(caught.value).startswith(f"resume='{checkpoint}': ") and str(caught.value).endswith(told)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["fits"]


@pytest.mark.parametrize("make", [folder, binary, circle, wrong_base])
def test_a_recipe_that_is_none(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "recipe.yaml"
    make(path)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


@pytest.mark.parametrize(
    ("channel", "settings", "gpus", "told"),
    [
        ("nccl", [], 1, "NCCL refuses an engine and a learner on one GPU; set weights.transport=auto"),
        ("nccl", ["placement=shared"], 2, "NCCL refuses an engine and a learner on one GPU"),
        ("nccl", ["placement=alternate"], 2, "NCCL refuses an engine and a learner on one GPU"),
        (
            "ipc",
            ["placement=alternate"],
            2,
            "its blocks stay on the GPU in the engine's turn; set weights.transport=auto",
        ),
        ("nccl", ["steps=0"], 2, "steps=0 leaves a learner none"),
        ("nccl", ["placement=apart", "network.transport=tcp"], 2, "meet at a file, and network.transport=tcp has none"),
        ("nccl", ["placement=apart"], 2, ""),
        (
            "ipc",
            [],
            2,
            "placement=auto gives .* one each; set placement=shared, or weights.transport=auto",
        ),
        ("ipc", ["placement=apart"], 1, "placement=apart gives engine and learner one each"),
        (
            "ipc",
            ["placement=shared", "generator.count=2"],
            2,
            r"not generator\.count=2, .*; set weights\.trans",
        ),
        ("ipc", ["placement=shared", "generator.tensor_parallel=2"], 2, r"not .* generator\.tensor_parallel=2"),
        ("ipc", ["placement=shared", "learner.ranks=2"], 2, r"not .* learner\.ranks=2"),
        ("ipc", ["network.transport=tcp"], 1, "meet at a file, and network.transport=tcp has none"),
        ("ipc", [], 1, ""),
        ("ipc", ["placement=shared"], 2, ""),
    ],
)
def test_channels_between_devices_are_refused_where_they_cannot_work(
    channel: str, settings: list[str], gpus: int, told: str
) -> None:
    one_each = "generator.count=1", "learner.ranks=1"
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [f"weights.transport={channel}", *one_each, *settings])
    with pytest.raises(ConfigError, match=f"weights.transport='{channel}': .*{told}") if told else nullcontext():
        preflight._check_channel(config, "cuda", gpus)


@pytest.mark.parametrize(
    ("settings", "channel"),
    [([], "shm"), (["network.transport=tcp"], "tcp"), (["network.transport=tcp", "weights.transport=shm"], "shm")],
)
def test_the_channel_follows_the_network_unless_it_is_named(settings: list[str], channel: str) -> None:
    assert load_config(None, settings).channel == channel


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["cluster.nodes=2", "network.transport=ipc"], "set network.transport=tcp"),
        (["cluster.nodes=2", "weights.transport=shm"], "weights.transport=shm: no machine sees another's memory"),
        (["cluster.nodes=2", "cluster.engine=ssh"], "host names"),
        (["cluster.nodes=[one, two]"], "host names"),
        (["cluster.nodes=-1"], "0 to 1024 machines"),
        (
            ["cluster.nodes=2", "cluster.place={learner: [3]}"],
            r"place.learner=\[3\]: machines are numbers from 1 to nodes",
        ),
        (["cluster.nodes=2", "cluster.place={broker: [1]}"], "broker"),
        (["cluster.nodes=2", "cluster.lease_s=0"], "lease_s"),
    ],
)
def test_machines_that_cannot_be_are_refused_in_one_line(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        load_config(None, ["network.transport=tcp", *overrides])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        (GPT2Config(n_layer=1, n_embd=16, n_head=2), "has no `layers`"),
        (Gemma2Config(num_hidden_layers=1, hidden_size=16), "final_logit_softcapping"),
        (DeepseekV3Config(num_hidden_layers=1, hidden_size=16), "latent attention"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_cannot_be_trained(architecture: PreTrainedConfig, told: str, tmp_path: Path) -> None:
    architecture.save_pretrained(tmp_path)
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [f"model.path={tmp_path}"])
    with pytest.raises(ConfigError, match=told) as caught:
        check_model_is_trainable(config, tmp_path)
    assert str(caught.value).startswith(f"model.path={str(tmp_path)!r} cannot be trained")


def listed(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    rows = [f"{number}, GPU-{number}aaaa-bbbb, 81559, 00000000:F{number}:00.0" for number in range(4)]
    return subprocess.CompletedProcess(command, 0, "\n".join(rows) + "\n", "")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", listed)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("3, 1", ["3", "1"]),
        ("GPU-2aaaa", ["GPU-2aaaa"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_users_gpus_are_taken_and_no_others(
    chosen: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.name for gpu in visible_gpus()] == names

    config = load_config(EXPERIMENTS / "math_cpu.yaml", ["device=cuda", "generator.count=1", "learner.ranks=1"])
    if len(names) >= gpus_needed(config):
        plan = make_plan(config, "cuda", visible_gpus())
        taken = {spec.role: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in plan if spec.gpus}
        assert taken == {"generator": names[0], "learner": names[1]}


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    with pytest.raises(ConfigError, match="'7'"):
        visible_gpus()


@pytest.mark.usefixtures("four_gpus")
def test_a_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", silent)
    with pytest.raises(ConfigError, match=r"nvidia-smi has not answered for 60 s: .* nvidia-smi -pm 1"):
        visible_gpus()


def test_an_evaluation_leaves_the_gpus_to_the_engines() -> None:
    config = load_config(EXPERIMENTS / "math_8gpu.yaml", ["steps=0"])
    assert gpus_needed(config) == 5
    five = [Gpu(str(number), 80 * GIB) for number in range(5)]
    learners = [spec for spec in make_plan(config, "cuda", five) if spec.role == "learner"]
    assert learners and not any(spec.gpus for spec in learners)
    assert all(spec.environment["CUDA_VISIBLE_DEVICES"] == "" for spec in learners)


def test_tokens_that_read_old_keys_and_values_cannot_be_compared_exactly() -> None:
    with pytest.raises(ConfigError, match=r"alarms.exact=0.0001: generator.on_update=keep .*on_update=recompute"):
        load_config(None, ["alarms.exact=1e-4", "generator.on_update=keep"])
