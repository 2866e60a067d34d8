"""Tool calls in a model's text: the Hermes/Qwen form, and fenced blocks for models that know no tools.

    <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>        ```bash
                                                                                   ls
                                                                                   ```
The parser is the one that the gateway's agents have (`rollout.episodes.parsing`): what stands in a thought is a draft,
and no call. A call that cannot be understood becomes a `BadCall`, whose text tells the model what to write instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from rollout.episodes.parsing import THINK_BEGIN, HermesParser

MAX_CALLS = 8
"""The most calls of one turn."""
_PARSER = HermesParser()
_BEGIN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(bash|sh|shell|submit)[ \t]*\r?\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_EXAMPLE = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that exists, with arguments of the right types."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be made, and what the model is told."""

    why: str


@dataclass(frozen=True)
class Tool:
    """`parameters`: name to (JSON type, description, required)."""

    name: str
    description: str
    parameters: dict[str, tuple[str, str, bool]]

    def schema(self) -> dict[str, object]:
        """The tool as OpenAI's function schema, which Hermes and Qwen templates show in their system message."""
        properties = {name: {"type": kind, "description": text} for name, (kind, text, _) in self.parameters.items()}
        required = [name for name, (_, _, needed) in self.parameters.items() if needed]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "bash",
        "Run a shell command in the repository. Each call is a new shell; processes end with it, files stay.",
        {"command": ("string", "The command.", True)},
    ),
    Tool(
        "view",
        "Show a file with line numbers, or list a folder.",
        {
            "path": ("string", "Path, relative to the repository.", True),
            "start": ("integer", "First line, from 1.", False),
            "end": ("integer", "Last line.", False),
        },
    ),
    Tool(
        "edit",
        "Replace a text that occurs exactly once in a file. With an empty old text, create a new file.",
        {
            "path": ("string", "Path, relative to the repository.", True),
            "old": ("string", "The exact text to replace.", True),
            "new": ("string", "What takes its place.", True),
        },
    ),
    Tool("submit", "Hand in the work as it stands. Ends the task.", {}),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}
_TYPES: dict[str, type] = {"string": str, "integer": int}


def tools_text(tools: tuple[Tool, ...] = TOOLS) -> str:
    """The tools section of a system message, as the chat templates of Hermes and Qwen write it."""
    listed = "\n".join(json.dumps(tool.schema()) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{listed}\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def render_call(call: ToolCall) -> str:
    """What a model writes to make this call."""
    written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def parse_calls(text: str) -> list[ToolCall | BadCall]:
    """The calls of one turn, in order; never empty: a turn without any is one BadCall. Never raises."""
    turn = _PARSER.parse(text)
    content = turn.content.partition(THINK_BEGIN)[0]  # a thought behind text that does not end
    found = [_arguments(name, arguments) for name, arguments in turn.calls]

    # What the parser has left where it stood is no call that could be made.
    left = content.count(_BEGIN)
    found += [_parse(body) for body in _CALL.findall(content)]
    if left > len(found) - len(turn.calls):
        found.append(BadCall("a <tool_call> is not closed by </tool_call>"))
    if not found:
        for kind, body in _FENCE.findall(content):
            found.append(ToolCall("submit", {}) if kind == "submit" else ToolCall("bash", {"command": body}))

    if not found:
        return [BadCall(f"no tool call found. Call a tool like this:\n{_EXAMPLE}")]
    if len(found) > MAX_CALLS:
        return [*found[:MAX_CALLS], BadCall(f"only the first {MAX_CALLS} calls of a turn are made")]
    return found


def _parse(body: str) -> ToolCall | BadCall:
    try:
        value = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the text of the <tool_call> is not JSON ({error}). Write:\n{_EXAMPLE}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall(f'a <tool_call> needs "name" and "arguments". Write:\n{_EXAMPLE}')

    return _arguments(value["name"], value.get("arguments", value.get("parameters", {})))


def _arguments(name: str, arguments: object) -> ToolCall | BadCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return BadCall('"arguments" must be a JSON object')
    return _checked(name, arguments)


def _checked(name: str, arguments: dict[str, object]) -> ToolCall | BadCall:
    tool = _BY_NAME.get(name)
    if tool is None:
        return BadCall(f"there is no tool {name[:40]!r}; the tools are {', '.join(_BY_NAME)}")

    for argument, (kind, _, required) in tool.parameters.items():
        if argument not in arguments:
            if required:
                return BadCall(f"{name} needs the argument {argument!r}")
            continue
        value = arguments[argument]
        if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
            return BadCall(f"{name}: {argument!r} must be of type {kind}")

    unknown = [argument for argument in arguments if argument not in tool.parameters]
    if unknown:
        known = ", ".join(tool.parameters) or "none"
        return BadCall(f"{name} has no argument {unknown[0][:40]!r}; it has: {known}")
    return ToolCall(name, arguments)
