"""What the tools do, in a sandbox. Blocks; every call is answered with a text, whatever the agent wrote."""

from __future__ import annotations

from dataclasses import dataclass

from envs.sandbox import Command, Result, Sandbox, read_file, write_file
from envs.sandbox.process import cut_middle
from envs.sandbox.runtime import HARNESS
from envs.swe.checkout import Checkout
from envs.swe.tool_calls import ToolCall

_VIEW_LINES = 200


@dataclass(frozen=True)
class ToolResult:
    """What the model is shown, and whether the call did what was asked."""

    text: str
    ok: bool = True


class Toolbox:
    """`output_bytes`: longest answer; `command_s`: longest command."""

    def __init__(self, sandbox: Sandbox, checkout: Checkout, output_bytes: int, command_s: float) -> None:
        self._sandbox = sandbox
        self._output_bytes = output_bytes
        self._command_s = command_s
        # With the harness's packages, so that `python -m pytest` works.
        workspace = checkout.template.workspace
        roots = [f"{workspace}/{folder}".removesuffix("/.") for folder in checkout.python_path]
        self._environment = {"PYTHONPATH": ":".join([f"{HARNESS}/site", *roots])}

    def call(self, call: ToolCall) -> ToolResult:
        """`submit` is the caller's. Raises SandboxError for faults of the host only."""
        arguments = call.arguments
        if call.name == "bash":
            return self.bash(str(arguments["command"]))
        if call.name == "view":
            return self.view(str(arguments["path"]), _integer(arguments.get("start")), _integer(arguments.get("end")))
        return self.edit(str(arguments["path"]), str(arguments["old"]), str(arguments["new"]))

    def bash(self, command: str) -> ToolResult:
        if "\0" in command:
            return ToolResult("Error: the command holds a null character.", ok=False)

        # Through stdin: a command line has a limit that a script does not.
        argv = ["bash", "-c", 'script=$(cat); exec 0</dev/null; eval "$script"']
        script = command.encode(errors="replace")
        result = self._sandbox.run(Command(argv, script, self._command_s, self._environment))

        text = self._shortened(result).rstrip("\n")
        if result.timed_out:
            text += f"\n[killed: ran longer than {self._command_s:g} s]"
        elif result.out_of_memory:
            text += "\n[killed: out of memory]"
        elif result.exit_code:
            text += f"\n[exit code {result.exit_code}]"
        return ToolResult(text.removeprefix("\n") or "[no output]", ok=result.ok)

    def view(self, path: str, start: int | None, end: int | None) -> ToolResult:
        if "\0" in path:
            return ToolResult("Error: the path holds a null character.", ok=False)
        content = read_file(self._sandbox, path)
        if content is None:
            result = self._sandbox.run(Command(["ls", "-A", "-p", "--", path]))
            return ToolResult(self._shortened(result).strip("\n") or "[empty folder]", ok=result.ok)

        lines = content.decode(errors="replace").splitlines()
        first = max(1, start or 1)
        last = min(len(lines), end or first + _VIEW_LINES - 1)
        shown = "\n".join(f"{number:6d}\t{lines[number - 1]}" for number in range(first, last + 1))
        if not shown:
            return ToolResult(f"Error: {path} has {len(lines)} lines; there is none from {first} on.", ok=False)
        rest = f"\n[{len(lines) - last} more lines]" if last < len(lines) else ""
        return ToolResult(cut_middle(shown.encode(errors="replace"), self._output_bytes) + rest)

    def edit(self, path: str, old: str, new: str) -> ToolResult:
        if "\0" in path or not path.strip():
            return ToolResult("Error: the path is empty or holds a null character.", ok=False)

        content = read_file(self._sandbox, path)
        if content is None:
            exists = not self._sandbox.run(Command(["test", "-e", path])).exit_code
            if exists or old:
                why = "cannot be read as a file" if exists else "does not exist (to create it, leave old empty)"
                return ToolResult(f"Error: {path} {why}.", ok=False)
            return self._write(path, new.encode(errors="replace"), "created")

        if not old:
            return ToolResult(f"Error: {path} exists; old must be a text that occurs in it exactly once.", ok=False)
        replaced = old.encode(errors="replace")
        count = content.count(replaced)
        if count != 1:
            why = "does not occur" if not count else f"occurs {count} times; add lines around it until it is unique"
            return ToolResult(f"Error: the old text {why} in {path}. Nothing was changed.", ok=False)
        return self._write(path, content.replace(replaced, new.encode(errors="replace")), "changed")

    def _shortened(self, result: Result) -> str:
        return cut_middle(result.output, self._output_bytes, result.left_out_bytes)

    def _write(self, path: str, content: bytes, what: str) -> ToolResult:
        if not write_file(self._sandbox, path, content):
            return ToolResult(f"Error: {path} cannot be written.", ok=False)
        return ToolResult(f"{path} {what}.")


def extract_diff(sandbox: Sandbox, base: str, limit: int) -> str:
    """All changes since `base`, new files included, as the sandbox's own git tells them; empty if it cannot.

    Hostile text: the agent may have done anything to its git. It is only ever applied in another sandbox. Raises
    SandboxError for faults of the host: what it lost was perhaps a solution.
    """
    git = "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=false"
    script = (
        f"{git} add --all >/dev/null 2>&1; "
        f"exec {git} diff --cached --binary --no-renames --no-color --no-ext-diff --no-textconv {base}"
    )
    result = sandbox.run(Command(["sh", "-c", script], separate_stderr=True))
    whole = result.ok and not result.left_out_bytes and len(result.output) <= limit
    return result.output.decode(errors="replace") if whole else ""


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None
