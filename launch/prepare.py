"""What has to be known before processes start and needs torch: the model's folder and size, the options of the
loss, the channel of the weights.

Runs in a short-lived child (`python -m launch.prepare HOW`), so that the supervisor never imports torch. HOW is `make`,
or `judge` to look at what is here and make nothing, or `validate` where no model is needed. The configuration comes on
stdin. Progress goes to stderr, and one JSON line to stdout: {"folder", "weight_bytes"} or {"error"}.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
from pydantic import ValidationError
from tokenizers import Tokenizer

from envs.registry import demonstrator
from launch.launcher.local import Begin, Command, Files, begin_process
from launch.memory import check_longest
from launch.refusing import Refusing
from rl.config.algo import AlgoConfig, is_endpoint
from rl.config.lora import LoraOptions, lora_options, served_adapter
from rl.config.schema import Config, ConfigError, nearest
from rl.learner.simulated import simulated_options
from rl.models.families import SERVED_MERGED, check_family, check_team, read_config
from rl.models.shape import ModelShape
from rl.store.checkpoint_folder import read_meta
from rl.store.digests import DIGESTS, damage, digest_of
from rl.weights import HOST_CHANNELS, channel_of
from rl.wire.process import die_with_parent

PREPARE_IMPORTS = ("launch.prepare", "launch.warm_start.tiny", "rl.learner.algorithm", "rl.models.policy")
_TIDY_S = 5.0  # for the child to remove what it has begun to make


@dataclass(frozen=True)
class Prepared:
    folder: Path | None  # local model folder; None where nothing needs a model
    weight_bytes: int  # one copy of the weights in the engine's dtype
    teacher: Path | None = None  # likewise; None as well where it is asked at an endpoint


def prepare(config: Config, *, make: bool = True, begin: Begin = begin_process) -> Prepared:
    """Validate the algorithm, and resolve the model. Without `make` nothing is fetched, made or trained: a model is
    judged that is here. Raises ConfigError with one line."""
    simulated = config.learner.kind == "simulated" and config.generator.engine == "simulated"
    if simulated and not needs_validation(config):
        return Prepared(None, simulated_options(config.learner).weight_bytes)
    how = "validate" if simulated else "make" if make else "judge"

    with (
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as answered,
        tempfile.TemporaryDirectory() as scratch,
    ):
        asked.write(config.model_dump_json().encode())
        asked.seek(0)

        # Importing transformers makes the folder of what torch compiles.
        environment = {} if make else {"TORCHINDUCTOR_CACHE_DIR": scratch}
        command = Command("launch.prepare", [how], environment, PREPARE_IMPORTS)
        code = _run_child(command, (asked, answered, sys.stderr), begin)
        answered.seek(0)
        words = answered.read()

    try:
        answer = json.loads(words.splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(f"preparing the model failed (exit code {code}); see the lines above") from None

    if "error" in answer:
        raise ConfigError(answer["error"])
    if simulated:
        return Prepared(None, simulated_options(config.learner).weight_bytes)
    folder, teacher = (Path(answer[name]) if answer[name] else None for name in ("folder", "teacher"))
    return Prepared(folder, answer["weight_bytes"], teacher)


def needs_validation(config: Config) -> bool:
    """A simulated learner runs no loss, but what a recipe says of one is checked as if it did."""
    ours = config.channel in HOST_CHANNELS  # the module of another one imports torch
    return config.learner.kind != "simulated" or config.algo != AlgoConfig() or not ours


def _run_child(command: Command, files: Files, begin: Begin) -> int | None:
    """Run a child to its end; returns its exit code. A terminal's Ctrl-C reaches this process alone, which tells the
    child once."""
    child = begin(command, files)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            child.wait(_TIDY_S)
        raise


def _model_folder(config: Config, *, make: bool = True) -> Path | None:
    """A model that is not ours is judged before anything is made of it. None where it would have to be made."""
    base = None if config.model.path == "tiny" else _base_folder(config, fetch=make)
    if base is not None:
        check_model_is_trainable(config, base)
        if not (make or any(base.glob("*.safetensors"))):  # a plan needs no weights
            return None
        _weight_files(base)
        if not (base / DIGESTS).exists():  # what we exported was compared with its digests
            from rl.models.foreign import check_weights

            with Refusing(f"model.path={config.model.path!r}"):
                check_weights(base)
    _check_other_models(config)

    if not make:
        return base
    if config.model.warm_start.demonstrations:
        from launch.warm_start.imitation import warm_started

        made = warm_started(config, base)
    elif base is not None:
        return base
    else:
        from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model

        made = ensure_tiny_model(TinyRecipe.model_validate(config.model.tiny))
    check_model_is_trainable(config, made)
    return made


def config_folder(config: Config, *, fetch: bool) -> Path | None:
    """The folder with the `config.json` of `model.path`, of which gigabytes may be missing; None where it is not here.

    Raises ConfigError for a name that the hub cannot have, or does not answer to.
    """
    path = config.model.path
    if path == "tiny":
        return None
    if Path(path).exists():
        return Path(path) if (Path(path) / "config.json").exists() else None
    if not may_be_on_hub(path):
        made = "; a run writes its folder `model` at its end" if Path(path).name == "model" else ""
        raise ConfigError(f"model.path={path!r}: no such folder, and no hub name (owner/name){made}")
    if config.learner.kind == "simulated" and config.generator.engine == "simulated":
        return None

    with _reaching_the_hub(path):
        look = huggingface_hub.hf_hub_download if fetch else huggingface_hub.try_to_load_from_cache
        found = look(path, "config.json")
        return Path(found).parent if isinstance(found, str) else None


@contextlib.contextmanager
def _reaching_the_hub(path: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path={path!r}: neither a folder nor reachable on the hub ({reason})") from None


def _base_folder(config: Config, *, fetch: bool) -> Path | None:
    path = config.model.path
    folder = Path(path)
    if folder.exists():
        if not (folder / "config.json").exists():
            raise ConfigError(f"model.path={path!r}: no config.json in this folder")
        if (folder / DIGESTS).exists() and (changed := damage(folder, folder / DIGESTS)):
            raise ConfigError(
                f"model.path={path!r}: {changed.name} was damaged or removed since the model was exported"
            )
        return folder.resolve()

    if not fetch:
        return None
    told = config_folder(config, fetch=True)
    if told is not None:
        check_family_of(config, read_config(told))  # gigabytes come after it
    with _reaching_the_hub(path):
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=wanted))


def _weight_files(folder: Path) -> dict[str, Path]:
    from rl.models.loading import weight_files

    with Refusing("model.path"):
        return weight_files(folder)


def _weight_bytes(config: Config, folder: Path) -> int:
    """The bytes of one version, as engines get it."""
    from rl.models.loading import exported_elements

    files = _weight_files(folder)
    if (lora := served_adapter(config.model)) is not None:
        elements = ModelShape.of(read_config(folder)).adapters(lora.rank, lora.named)
    else:
        elements = exported_elements(files)
    return elements * (4 if config.generator.dtype == "float32" else 2)


def validate(config: Config) -> None:
    """What can be said of `algo` and `model` before anything is fetched or made. Raises ConfigError."""
    from rl.learner.algorithm import make_algorithm

    with Refusing("algo", TypeError, ValueError):  # a loss of the user's own may take other arguments
        make_algorithm(config)
    _check_model(config)
    channel_of(config.channel)


def _check_model(config: Config) -> None:
    if config.model.path == "tiny":
        from launch.warm_start.tiny import TinyRecipe

        try:
            TinyRecipe.model_validate(config.model.tiny)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            hint = nearest(key, list(TinyRecipe.model_fields)) if first["type"] == "extra_forbidden" else ""
            raise ConfigError(f"model.tiny.{key}={first['input']!r}: {first['msg']}{hint}") from None

    if config.model.warm_start.demonstrations:
        demonstrator(config.env.name)


def check_family_of(config: Config, told: Mapping[str, Any]) -> None:
    """What a `config.json` says of `model.path`, without torch. Raises ConfigError."""
    if config.learner.kind == "simulated":
        return
    with Refusing(f"model.path={config.model.path!r} cannot be trained"):
        check_family(told, untested=config.model.untested)
    _check_team(config, told, f"model.path={config.model.path!r}")


def _check_team(config: Config, told: Mapping[str, Any], field: str) -> None:
    """`learner.context_parallel` ranks can compute the model of this field together. Raises ConfigError."""
    together = config.learner.context_parallel
    if together > 1:
        with Refusing(f"learner.context_parallel={together}: {field}"):
            check_team(told, together)

    family = str(told["model_type"])
    if served_adapter(config.model) is not None and (reason := SERVED_MERGED.get(family)):
        raise ConfigError(f"model.lora.serve=adapter: {family}: {reason}; set model.lora.serve=merged")


def check_model_is_trainable(config: Config, folder: Path) -> None:
    """Raises ConfigError for an architecture whose log-probabilities or exports the learner would get wrong, and for
    adapters that it cannot have."""
    if config.learner.kind != "simulated":
        _check_trainable(config, folder, f"model.path={config.model.path!r}", lora_options(config.model))
        _check_team(config, read_config(folder), f"model.path={config.model.path!r}")


def _check_other_models(config: Config) -> None:
    """The frozen reference and the critic, where they are not the starting weights."""
    algo = config.algo
    used = {
        "algo.kl.reference": algo.kl.reference if algo.kl.coef else "start",
        "algo.critic.path": algo.critic.path if algo.critic else "start",
    }
    for field, path in used.items():
        if path != "start" and config.learner.kind != "simulated":
            _check_trainable(config, Path(path), f"{field}={path!r}")
            _check_team(config, read_config(Path(path)), f"{field}={path!r}")


def _teacher_folder(config: Config, *, make: bool) -> Path | None:
    """The local folder of `algo.teacher`; None where it is at an endpoint, or not here yet. Raises ConfigError."""
    path = config.algo.teacher
    if path is None or is_endpoint(path) or not config.steps:
        return None
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    try:
        folder = _base_folder(named, fetch=make)
        if folder is not None and (make or any(folder.glob("*.safetensors"))):  # a plan needs no weights
            _weight_files(folder)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "algo.teacher", 1)) from None

    if folder is not None:
        _check_trainable(config, folder, f"algo.teacher={path!r}")
    return folder


def other_tokens(student: Path, teacher: Path) -> str:
    """How the student's tokens are not the teacher's, in a few words; empty: it can score each of them."""
    try:
        ours, theirs = (
            Tokenizer.from_file(str(each / "tokenizer.json")).get_vocab(with_added_tokens=True)
            for each in (student, teacher)
        )
    except Exception as error:  # the library raises nothing narrower
        return f"tokenizer.json cannot be read ({error})"

    for token, id in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != id:
            known = f"id {theirs[token]} there" if token in theirs else "unknown there"
            return f"the token {token!r} has id {id} in model.path and is {known}"
    sizes = [int(told.get("text_config", told)["vocab_size"]) for told in map(read_config, (student, teacher))]
    return f"it has {sizes[1]} logits, and model.path {sizes[0]}" if sizes[1] < sizes[0] else ""


def _check_trainable(config: Config, folder: Path, field: str, options: LoraOptions | None = None) -> None:
    from rl.models.policy import check_trainable

    with Refusing(f"{field} cannot be trained"):
        check_trainable(folder, untested=config.model.untested, options=options, path=config.model.path)
        shape = ModelShape.of(read_config(folder))
    check_longest(config, shape, field)


def may_be_on_hub(path: str) -> bool:
    return bool(path) and not path.startswith((".", "/", "~")) and path.count("/") <= 1


def _folders(config: Config, *, make: bool) -> dict[str, object]:
    """Of the model and of its teacher, which is judged before anything is made of the model. Raises ConfigError."""
    teacher = _teacher_folder(config, make=make)
    folder = _model_folder(config, make=make)
    if folder is None:
        return {}
    if teacher is not None and (wrong := other_tokens(folder, teacher)):
        field = f"algo.teacher={config.algo.teacher!r}"
        raise ConfigError(f"{field}: {wrong}; a teacher must share the vocabulary of its student")
    if make:
        _check_base(config, folder)
    told = {"folder": str(folder), "weight_bytes": _weight_bytes(config, folder)}
    return told | {"teacher": str(teacher) if teacher else None}


def _check_base(config: Config, folder: Path) -> None:
    """Adapters of a checkpoint go on beside the weights that they were trained beside. Raises ConfigError."""
    meta = read_meta(config.resume) if config.resume is not None else None
    if meta is None or meta.lora is None:
        return
    if digest_of({*_weight_files(folder).values()}) != meta.lora["base"]:
        raise ConfigError(
            f"model.path={config.model.path!r}: the adapters of resume={str(config.resume)!r} belong to other weights; "
            "name the model that they were trained beside"
        )


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has begun us in the background
    config = Config.model_validate_json(sys.stdin.read())
    answer: dict[str, object] = {"folder": None, "weight_bytes": 0, "teacher": None}
    try:
        validate(config)
        if sys.argv[1] != "validate":
            answer |= _folders(config, make=sys.argv[1] == "make")

    except ConfigError as error:
        answer = {"error": str(error)}
    except OSError as error:  # of the cache: a full disk, or a folder that cannot be written
        answer = {"error": f"the model cannot be prepared: {error}; FRESCO_CACHE names the folder of what is made"}
    except KeyboardInterrupt:  # what it had begun to make is gone; whoever asked says why
        sys.exit(130)

    print(json.dumps(answer))


if __name__ == "__main__":
    main()
