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


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 success, 1 failure, 2 bad configuration, 130 interrupted."""
    arguments = parse(argv)
    own_packages_first()
    # Else torch makes a folder in /tmp that stays there; in the user's cache its next run finds what it has compiled.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
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
    _add_init(commands.add_parser("init", help="begin: a folder with a recipe, a reward, rows and a test"))
    _add_run(commands.add_parser("run", help="train; any field of the configuration may be overridden with key=value"))
    _add_cluster(commands)
    _add_sft(commands.add_parser("sft", help="supervised fine-tuning on rows of conversations"))
    _add_eval(commands.add_parser("eval", help="success on held-out tasks, by task type, through the rollout path"))
    _add_check_loss(commands.add_parser("check-loss", help="try a loss against what every loss must hold, in seconds"))
    _add_env(commands.add_parser("env", help="environments: `fresco env check NAME`"))
    _add_plan(commands.add_parser("plan", help="predict step times of GPU splits, alpha and redundancy; name the best"))

    _add_show(commands.add_parser("show", help="print what the model said, episode by episode"))
    _add_trace(commands.add_parser("trace", help="write what happened when, for Perfetto (Chrome's trace format)"))
    _add_top(commands.add_parser("top", help="watch a running run: what every process does or waits for"))
    _add_report(commands.add_parser("report", help="write one HTML file that shows runs, by itself and offline"))

    _add_time_machine(commands)

    _add_export(commands.add_parser("export", help="write a checkpoint as a model, or its adapters for peft and vLLM"))
    _add_push(commands.add_parser("push", help="upload a run's trained model to the hub"))
    doctor = commands.add_parser("doctor", help="say what this machine has and what is missing")
    doctor.set_defaults(call="launch.commands.doctor:diagnose")

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
    parser.set_defaults(call="launch.commands.init:init")


def _add_run(parser: argparse.ArgumentParser) -> None:
    named = "a file, or the name of one that comes with Fresco"
    parser.add_argument("recipe", type=find_recipe, nargs="?", help=f"{named}; --help-fields needs none")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --dry-run: the whole configuration as well")
    _add_machine(parser, "with --dry-run: the machine that it is for, as GPUs times the GB of each: 8x80")
    fields = "list the fields whose name or help matches this, with type and default ('' for all), and start nothing"
    parser.add_argument("--help-fields", metavar="PATTERN", help=fields)
    parser.set_defaults(call="launch.commands.run:run")


def _add_cluster(commands: Any) -> None:
    join = commands.add_parser("join", help="let this machine work for a run whose head is elsewhere, until it ends")
    join.add_argument("head", help="HOST:PORT, as the run prints it")
    join.add_argument("--key", required=True, metavar="FILE", help="the run's agents.key; - reads it from stdin")
    join.add_argument("--machine", type=_number(1), default=0, metavar="N", help="the number it has, if that is free")
    join.set_defaults(call="launch.commands.join:join")
    head = commands.add_parser("head", help="take the place of a head that died: its agents wait out their lease")
    head.add_argument("--resume", required=True, type=Path, metavar="RUN", help="its folder, or that of an agent")
    head.add_argument("overrides", nargs="*", metavar="key=value", help="where it begins anew: network.host=…")
    head.set_defaults(call="launch.commands.head:resume")
    leave = commands.add_parser("leave", help="let this machine leave a run in good order")
    leave.add_argument("head", help="HOST:PORT, as given to `fresco join`")
    leave.set_defaults(call="launch.commands.join:leave")


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
    parser.set_defaults(call="launch.commands.sft:sft")


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
    parser.set_defaults(call="launch.commands.evaluate:evaluate", temperatures=(0.0, 1.0))

    how = parser.add_mutually_exclusive_group()
    greedy = "temperature 0 only; default: greedy and temperature 1"
    how.add_argument("--greedy", action="store_const", const=(0.0,), dest="temperatures", help=greedy)
    how.add_argument("--temperature", type=float, nargs=1, dest="temperatures", metavar="T", help="this one only")


def _add_check_loss(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a registered loss or an importable package.module:Name")
    parser.add_argument("options", nargs="*", default=[], metavar="option=value")
    parser.set_defaults(call="launch.commands.check_loss:run")


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
    check.set_defaults(call="launch.commands.check_env:check")


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
    parser.add_argument("--plot", type=Path, default=Path("plan.png"), help="where the plot goes (PNG)")
    parser.set_defaults(call="launch.commands.plan:plan")


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
    parser.set_defaults(call="launch.commands.show:show")


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
    parser.set_defaults(call="launch.commands.trace:export")


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--once", action="store_true", help="print what there is now, and end")
    parser.set_defaults(call="launch.commands.top:top")


def _add_time_machine(commands: Any) -> None:
    replay = commands.add_parser("replay", help="train a run's recorded steps again: bit for bit, or changed")
    lab = commands.add_parser("lab", help="the run's own batches under several losses, advantages or corrections")
    bisect = commands.add_parser("bisect", help="where two runs part first, or which commit made the difference")
    for each in (replay, lab, bisect):
        each.add_argument("run", type=Path, help="a run's folder, with batches (tracking.replay)")
        each.add_argument("--from", type=int, dest="first", metavar="N", help="the first step (the earliest there is)")
        each.add_argument("--to", type=int, dest="last", metavar="M", help="up to this version (the last one)")
    trust = "how near a changed policy must stay: least effective sample size, largest KL in nats a token (0.5,0.05)"
    for each in (replay, lab):
        each.add_argument("--trust", default="0.5,0.05", metavar="ESS,KL", help=trust)

    replay.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields of algo or the learner")
    exact = "compare each token with the weights that sampled it; name the first batch beyond NATS (alarms.exact)"
    replay.add_argument("--exact", type=_number(0, kind=float), metavar="NATS", help=exact)
    replay.add_argument("--trail", type=Path, help="write digests of what each step computed to this JSON file")
    replay.set_defaults(call="launch.commands.replay:replay")

    lab.add_argument("--losses", default="", metavar="A,B,…", help="registered losses, or package.module:name")
    more = "another variant: fields of algo or of the learner, as one word; may be given again"
    lab.add_argument("--with", action="append", default=[], dest="variants", metavar="'key=value …'", help=more)
    lab.set_defaults(call="launch.commands.lab:lab")

    bisect.add_argument("other", type=Path, nargs="?", help="the run that came out otherwise")
    bisect.add_argument("--replay", action="store_true", help="compute the step anew, under the code of each run")
    bisect.add_argument("--good", metavar="COMMIT", help="with one run: a commit that computes it right")
    bisect.add_argument("--bad", metavar="COMMIT", help="a later one that does not")
    bisect.set_defaults(call="launch.commands.bisect:bisect")

    change = commands.add_parser("set", help="change a field of a run that goes on, at the end of a step")
    undo = commands.add_parser("undo", help="take a run that goes on back to one of its checkpoints")
    for each in (change, undo):
        each.add_argument("run", type=Path, help="the folder of a run that goes on")
    change.add_argument("overrides", nargs="+", metavar="key=value", help="learner.lr and others that every step reads")
    change.set_defaults(call="launch.commands.change:set_fields")
    undo.add_argument(
        "--to", type=int, required=True, metavar="N", help="the step of one of its two newest checkpoints"
    )
    undo.set_defaults(call="launch.commands.change:undo")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="a checkpoint, or a run's folder (its newest checkpoint)")
    parser.add_argument("out", type=Path, help="the folder to write, a new one")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--merge", action="store_true", help="a model for transformers and vLLM")
    how.add_argument("--adapter", action="store_true", help="of a run with model.lora: the adapters alone")
    parser.set_defaults(call="launch.commands.export:export")


def _add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run's folder, or a model's")
    parser.add_argument("name", help="owner/name on the hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="where it is made, for its owner only")
    parser.set_defaults(call="launch.commands.push:push")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="folders of runs, in whatever state")
    parser.add_argument("--out", type=Path, help="where the file goes; default: report.html in the first run's folder")
    parser.add_argument("--serve", action="store_true", help="show it on this machine, and follow runs that go on")
    parser.add_argument("--port", type=_number(0, 65535), default=0, help="of --serve; default: any that is free")
    parser.set_defaults(call="launch.commands.report:report")


if __name__ == "__main__":
    sys.exit(main())
