"""`fresco`: the one command line.

    fresco init my_task [--model Qwen/Qwen3-0.6B]
    fresco run experiments/math_cpu.yaml learner.lr=1e-4 rollout.alpha=2 [--dry-run]
    fresco sft rows.jsonl model.path=Qwen/Qwen3-0.6B --epochs 2 --held-out 100
    fresco eval runs/math_cpu/checkpoints/* --data rows.jsonl --temperature 1 eval.samples=8
    fresco eval runs/alfworld_small/checkpoints/step-80 --env alfworld --split valid_unseen [--greedy | --temperature 1]
    fresco check-loss my_module:my_loss clip_high=0.3
    fresco env check gymnasium env.options.id=Taxi-v4
    fresco run math_8gpu --dry-run --gpus 8x80 --host-memory 1T --cores 192
    fresco plan --run runs/math_8gpu --gpus 8
    fresco plan --run runs/math_8gpu --gpus 32x80 --machines 4 --link 10G
    fresco show runs/math_cpu --failed --kind eval
    fresco top runs/math_cpu
    fresco trace runs/math_cpu --out trace.json
    fresco report runs/math_cpu runs/math_cpu_alpha2 --out compared.html
    fresco report runs/math_cpu --serve
    fresco replay runs/math_cpu --from 40 algo.loss=topr
    fresco lab runs/math_cpu --from 40 --losses topr,cispo,my_module:mine
    fresco bisect runs/math_cpu runs/math_cpu.1 --replay
    fresco set runs/math_cpu learner.lr=1e-5
    fresco undo runs/math_cpu --to 40
    fresco export runs/math_cpu/checkpoints/step-40 my_model --merge
    fresco push runs/math_cpu me/my-model
    fresco join 10.0.0.1:40123 --key agents.key
    fresco leave 10.0.0.1:40123
    fresco head --resume runs/math_cpu
    fresco doctor

Each command says more with --help.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from launch import __version__
from launch.terminal import say
from rl.config.failures import CANNOT_WRITE
from rl.config.plugins import own_packages_first, own_place, told
from rl.config.recipes import find_recipe
from rl.config.schema import ConfigError
from rl.store.made_once import cache_folder

_COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Variables of libraries that compile, and their folders in the user's cache."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 success, 1 failure, 2 bad configuration, 130 interrupted."""
    arguments = parse(argv)
    own_packages_first()
    # The next run finds what this one has compiled. Else torch makes a folder in /tmp that stays there.
    for name, folder in _COMPILED.items():
        os.environ.setdefault(name, str(cache_folder() / folder))
    try:
        # Only now, so that a command imports what it needs and no more: `fresco doctor` works where torch is missing.
        with _ends_as_interrupts():
            code: int = resolve_name(arguments.call)(arguments)

    except KeyboardInterrupt:  # before a run's supervisor, or after it
        print("fresco: interrupted", file=sys.stderr)
        return 130

    except ConfigError as error:
        sys.stdout.flush()  # in a log file, too, the error stands below the configuration
        say(f"fresco: {error}", sys.stderr)
        return 2

    except Exception as error:
        if isinstance(error, OSError) and _named_in(arguments, error.filename):
            say(f"fresco: {str(error.filename)!r}: {error.strerror}; name another one", sys.stderr)
            return 2
        if own_place(error) and not isinstance(error, OSError):
            say(f"fresco: {told(error)}", sys.stderr)
            return 1
        if not isinstance(error, OSError) or error.errno not in (*CANNOT_WRITE, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer goes nowhere
        print(f"fresco: {error}", file=sys.stderr)
        return 1

    return code


def _named_in(arguments: argparse.Namespace, path: object) -> bool:
    """Whether the path is one that the command was told, or lies in it."""
    told = [each for each in vars(arguments).values() if isinstance(each, Path)]
    return isinstance(path, str | Path) and any(Path(path).is_relative_to(each) for each in told)


@contextlib.contextmanager
def _ends_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP (unless `nohup` is in use) are Ctrl-C: what was begun is tidied up.

    So is SIGINT also where a shell that began us in the background has it ignored. A thread that calls a command cannot
    change what signals do.
    """
    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    if numbers and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of one command; `call` names the function that carries it out. Exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog="fresco", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"fresco {__version__}")
    commands = parser.add_subparsers(required=True)
    for name, (call, says, add) in _COMMANDS.items():
        command = commands.add_parser(name, help=says)
        command.set_defaults(call=f"launch.commands.{call}")
        add(command)

    # Overrides may also stand behind an option, where argparse takes them for unknown arguments.
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [item for item in rest if item.startswith("-") or "overrides" not in arguments]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    if getattr(arguments, "help_fields", None) is not None:
        arguments.call = "launch.commands.fields:help_fields"
    elif arguments.call == "launch.commands.run:run" and arguments.recipe is None:
        parser.error("fresco run needs a recipe: a file, or the name of one that comes with Fresco")
    return arguments


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a new one, wherever you like")
    parser.add_argument("--model", help="a folder or a hub name; default: a tiny one that is made, for a laptop")


def _add_run(parser: argparse.ArgumentParser) -> None:
    named = "a file, or the name of one that comes with Fresco"
    parser.add_argument("recipe", type=find_recipe, nargs="?", help=f"{named}; --help-fields needs none")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --dry-run: the whole configuration as well")
    _add_machine(parser, "with --dry-run: the machine that it is for, as GPUs times the GB of each: 8x80")
    fields = "list the fields whose name or help matches this, with type and default ('' for all), and start nothing"
    parser.add_argument("--help-fields", metavar="PATTERN", help=fields)


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", help="HOST:PORT, as the run prints it")
    parser.add_argument("--key", required=True, metavar="FILE", help="the run's agents.key; - reads it from stdin")
    parser.add_argument("--machine", type=_number(1), default=0, metavar="N", help="the number it has, if that is free")


def _add_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", required=True, type=Path, metavar="RUN", help="its folder, or that of an agent")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="where it begins anew: network.host=…")


def _add_leave(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", help="HOST:PORT, as given to `fresco join`")


def _add_sft(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="rows with `messages`, or `prompt` and `completion`: a file or a hub name")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--epochs", type=float, help="passes over the rows (1); or give steps=N")
    parser.add_argument("--batch", type=int, metavar="N", help="rows of one step (16)")
    held_out = "rows whose loss is told: the last N of the data, a file or a hub name"
    parser.add_argument("--held-out", metavar="N|FILE", help=held_out)
    parser.add_argument("--recipe", type=find_recipe, help="configuration; default: what is usual")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --dry-run: the whole configuration as well")


def _add_machine(parser: argparse.ArgumentParser, gpus: str) -> None:
    """What `launch.machine` reads; gpus: what `--gpus` means to this command."""
    parser.add_argument("--gpus", metavar="NxGB", help=gpus)
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of that machine: 512G, 1T")
    parser.add_argument("--cores", metavar="N", help="cores of that machine")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    target = "a checkpoint, a run's folder (its newest checkpoint), a model folder, a hub name"
    parser.add_argument("target", help=target)
    more = "more targets, which are compared, and fields of the configuration"
    parser.add_argument("overrides", nargs="*", default=[], metavar="target | key=value", help=more)
    parser.add_argument("--env", help="environment; default: that of the target's own run")
    parser.add_argument("--data", metavar="FILE", help="held-out tasks: rows of a file or a hub name")
    parser.add_argument("--split", help="held-out tasks to use (valid_seen, valid_unseen)")
    parser.add_argument("--episodes", type=int, help="tasks, one episode each; default: all")
    parser.add_argument("--recipe", type=find_recipe, help="configuration; default: the target's own run's")
    parser.add_argument("--out", type=Path, help="write the table and every episode to this JSON file")
    parser.set_defaults(temperatures=(0.0, 1.0))

    how = parser.add_mutually_exclusive_group()
    greedy = "temperature 0 only; default: greedy and temperature 1"
    how.add_argument("--greedy", action="store_const", const=(0.0,), dest="temperatures", help=greedy)
    how.add_argument("--temperature", type=float, nargs=1, dest="temperatures", metavar="T", help="this one only")


def _add_check_loss(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a registered loss or an importable package.module:Name")
    parser.add_argument("options", nargs="*", default=[], metavar="option=value")


def _add_env(parser: argparse.ArgumentParser) -> None:
    check = parser.add_subparsers(required=True).add_parser("check", help="certify an environment before a run")
    check.add_argument("name", help="a registered environment or an importable package.module:Name")
    check.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    check.add_argument("--recipe", type=find_recipe, help="configuration; default: <name>_cpu, if there is one")
    check.add_argument("--short", action="store_true", help="few tasks and episodes: seconds instead of minutes")
    check.add_argument("--episodes", type=int, help="over which nothing may grow (1000)")
    check.add_argument("--model", metavar="URL#NAME", help="an endpoint whose model shows how hard the tasks are")
    check.add_argument("--tries", type=int, default=4, help="of that model at each task (4)")
    check.add_argument("--out", type=Path, help="write the page to this JSON file")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=find_recipe, nargs="?", help="not needed with --run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--run", type=Path, help="a finished run's folder: distributions are fitted to it")
    _add_machine(parser, "in all, also with the GB of each: 8, 8x80 (default: those of the recipe)")
    parser.add_argument("--machines", metavar="N", help="that share the GPUs (default: cluster.nodes of the recipe)")
    parser.add_argument("--link", metavar="RATE", help="bits a second of each machine's cable: 10G, 400M")
    parser.add_argument("--train-s", type=float, help="seconds of one training step with the recipe's ranks")
    parser.add_argument("--decode-s", metavar="BASE,MORE", help="seconds of a decode step, and of each other sequence")
    parser.add_argument("--answer", metavar="MEAN,SIGMA", help="tokens of one answer, log-normal")
    parser.add_argument("--env-s", metavar="MEAN,SIGMA", help="seconds of one environment step, Gaussian clipped at 0")
    parser.add_argument("--plot", type=Path, default=Path("runs/plan.png"), help="where the plot goes (runs/plan.png)")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder, also of one that goes on or was killed")
    parser.add_argument("--kind", choices=["train", "eval"], help="training episodes or those of evaluations only")
    parser.add_argument("--step", type=_number(0), help="whose newest token was sampled by this version")
    parser.add_argument("--failed", action="store_true", help="without success")
    parser.add_argument("--reward", type=_range, help="this one, or a range: 0.2..0.8, ..0.5, 0.5..")
    parser.add_argument("--task", type=int, help="of this task")
    parser.add_argument("--group", type=int, help="all members of this group")
    parser.add_argument("--limit", type=_number(1), default=5, help="at most so many, the newest first (5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each")


def _range(text: str) -> tuple[float, float]:
    """The lowest and the highest value of `0.5` alone, `0.2..0.8`, `..0.5` or `0.5..`."""
    low, dots, high = text.partition("..")
    with contextlib.suppress(ValueError):
        lowest = float(low or ("-inf" if high else low))
        highest = float(high or "inf") if dots else lowest
        if lowest <= highest:  # nor is NaN
            return lowest, highest
    raise argparse.ArgumentTypeError(f"{text!r} is no number and no range such as 0.2..0.8, ..0.5, 0.5..")


def _number(least: int, most: int = 10**9, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    named = "whole number" if kind is int else "number"

    def number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most:  # nor is NaN
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no {named} from {least} to {most}")

    return number


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder, also of one that goes on or was killed")
    parser.add_argument("--out", type=Path, help="the file, compressed if it ends in .gz (RUN/trace.json.gz)")


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--once", action="store_true", help="print what there is now, and end")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    _add_recorded(parser)
    learns = "fields of algo, or of how the learner learns"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=learns)
    _add_trust(parser)
    exact = "compare each token with the weights that sampled it; name the first batch beyond NATS (alarms.exact)"
    parser.add_argument("--exact", type=_number(0, kind=float), metavar="NATS", help=exact)
    parser.add_argument("--trail", type=Path, help="write digests of what each step computed to this JSON file")


def _add_lab(parser: argparse.ArgumentParser) -> None:
    _add_recorded(parser)
    parser.add_argument("--losses", default="", metavar="A,B,…", help="registered losses, or package.module:name")
    more = "another variant: fields of algo or of the learner, as one word; may be given again"
    parser.add_argument("--with", action="append", default=[], dest="variants", metavar="'key=value …'", help=more)
    _add_trust(parser)


def _add_bisect(parser: argparse.ArgumentParser) -> None:
    _add_recorded(parser)
    parser.add_argument("other", type=Path, nargs="?", help="the run that came out otherwise")
    parser.add_argument("--replay", action="store_true", help="compute the step anew, under the code of each run")
    parser.add_argument("--good", metavar="COMMIT", help="with one run: a commit that computes it right")
    parser.add_argument("--bad", metavar="COMMIT", help="a later one that does not")


def _add_recorded(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder, with batches (tracking.replay)")
    parser.add_argument("--from", type=int, dest="first", metavar="N", help="the first step (the earliest there is)")
    parser.add_argument("--to", type=int, dest="last", metavar="M", help="up to this version (the last one)")


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run that goes on")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="learner.lr and others that every step reads")


def _add_undo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run that goes on")
    reach = "the step of one of its two newest checkpoints"
    parser.add_argument("--to", type=int, required=True, metavar="N", help=reach)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    trust = "how near a changed policy must stay: least effective sample size, largest KL in nats a token (0.5,0.05)"
    parser.add_argument("--trust", default="0.5,0.05", metavar="ESS,KL", help=trust)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="a checkpoint, or a run's folder (its newest checkpoint)")
    parser.add_argument("out", type=Path, help="the folder to write, a new one")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--merge", action="store_true", help="a model for transformers and vLLM")
    how.add_argument("--adapter", action="store_true", help="of a run with model.lora: the adapters alone")


def _add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder, or a model's")
    parser.add_argument("name", help="owner/name on the hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="where it is made, for its owner only")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="folders of runs, in whatever state")
    parser.add_argument("--out", type=Path, help="where the file goes; default: report.html in the first run's folder")
    parser.add_argument("--serve", action="store_true", help="show it on this machine, and follow runs that go on")
    parser.add_argument("--port", type=_number(0, 65535), default=0, help="of --serve; default: any that is free")


_COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "init": ("init:init", "begin: a folder with a recipe, a reward, rows and a test", _add_init),
    "run": ("run:run", "train; any field of the configuration may be overridden with key=value", _add_run),
    "join": ("join:join", "let this machine work for a run whose head is elsewhere, until it ends", _add_join),
    "head": ("head:resume", "take the place of a head that died: its agents wait out their lease", _add_head),
    "leave": ("join:leave", "let this machine leave a run in good order", _add_leave),
    "sft": ("sft:sft", "supervised fine-tuning on rows of conversations", _add_sft),
    "eval": ("evaluate:evaluate", "success on held-out tasks, by task type, through the rollout path", _add_eval),
    "check-loss": ("check_loss:run", "try a loss against what every loss must hold, in seconds", _add_check_loss),
    "env": ("check_env:check", "environments: `fresco env check NAME`", _add_env),
    "plan": ("plan:plan", "predict step times of GPU splits, alpha and redundancy; name the best", _add_plan),
    "show": ("show:show", "print what the model said, episode by episode", _add_show),
    "trace": ("trace:export", "write what happened when, for Perfetto (Chrome's trace format)", _add_trace),
    "top": ("top:top", "watch a running run: what every process does or waits for", _add_top),
    "report": ("report:report", "write one HTML file that shows runs, by itself and offline", _add_report),
    "replay": ("replay:replay", "train a run's recorded steps again: bit for bit, or changed", _add_replay),
    "lab": ("lab:lab", "the run's own batches under several losses, advantages or corrections", _add_lab),
    "bisect": ("bisect:bisect", "where two runs part first, or which commit made the difference", _add_bisect),
    "set": ("change:set_fields", "change a field of a run that goes on, at the end of a step", _add_set),
    "undo": ("change:undo", "take a run that goes on back to one of its checkpoints", _add_undo),
    "export": ("export:export", "write a checkpoint as a model, or its adapters for peft and vLLM", _add_export),
    "push": ("push:push", "upload a run's trained model to the hub", _add_push),
    "doctor": ("doctor:diagnose", "say what this machine has and what is missing", lambda _: None),
}
"""By name: the function that carries it out, what it does, and what adds its arguments."""


if __name__ == "__main__":
    sys.exit(main())
