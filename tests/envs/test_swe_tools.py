"""Tool calls in a model's text, what the tools do, and how they answer what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from envs.sandbox import Limits, SandboxError, Template
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.swe.checkout import Checkout
from envs.swe.environment import SYSTEM_PROMPT
from envs.swe.tool_calls import MAX_CALLS, TOOLS, BadCall, ToolCall, parse_calls, render_call, tools_text
from envs.swe.tools import Toolbox, extract_diff
from tests.envs.agents import tool_call


def test_hermes_calls() -> None:
    text = f"I look first.\n{tool_call('bash', command='ls')}\nthen\n{tool_call('view', path='a.py', start=3)}"
    assert parse_calls(text) == [ToolCall("bash", {"command": "ls"}), ToolCall("view", {"path": "a.py", "start": 3})]
    edit = ToolCall("edit", {"path": "a", "old": "x\n\t\"'</tool>", "new": ""})
    assert parse_calls(render_call(edit)) == [edit]
    as_text = '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>'
    assert parse_calls(as_text) == [ToolCall("bash", {"command": "ls"})]
    raw_newline = '<tool_call>\n{"name": "bash", "arguments": {"command": "a\nb"}}\n</tool_call>'
    assert parse_calls(raw_newline) == [ToolCall("bash", {"command": "a\nb"})]


def test_fenced_blocks() -> None:
    assert parse_calls("Let me see:\n```bash\nls -l\ncat x\n```\n") == [ToolCall("bash", {"command": "ls -l\ncat x\n"})]
    assert parse_calls("```submit\n```") == [ToolCall("submit", {})]
    mixed = f"```bash\nignored\n```\n{tool_call('submit')}"
    assert parse_calls(mixed) == [ToolCall("submit", {})]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("I am done.", "no tool call found"),
        ("```python\nx\n```", "no tool call found"),
        ("<tool_call>{}", "not closed"),
        ("<tool_call>ls</tool_call>", "is not JSON"),
        ("<tool_call>[1]</tool_call>", 'needs "name" and "arguments"'),
        ('<tool_call>{"name": "bash", "arguments": 3}</tool_call>', "must be a JSON object"),
        (tool_call("python", code="x"), "there is no tool 'python'; the tools are bash, view, edit, submit"),
        (tool_call("bash"), "bash needs the argument 'command'"),
        (tool_call("bash", command=["ls"]), "'command' must be of type string"),
        (tool_call("view", path="a", start=True), "'start' must be of type integer"),
        (tool_call("bash", command="ls", timeout=3), "bash has no argument 'timeout'; it has: command"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "is not JSON"),
    ],
)
def test_malformed_calls_are_told_what_to_write(text: str, why: str) -> None:
    (call,) = parse_calls(text)
    assert isinstance(call, BadCall) and why in call.why


def test_too_many_calls() -> None:
    calls = parse_calls(tool_call("bash", command="ls") * 20)
    assert len(calls) == MAX_CALLS + 1 and isinstance(calls[-1], BadCall)


@given(st.text() | st.text(alphabet='<tool_call>/{}"name:[]`bash\n'))
def test_parsing_never_raises(text: str) -> None:
    assert parse_calls(text) and parse_calls(f"<tool_call>{text}</tool_call>")


def test_the_system_text_is_qwens() -> None:
    text = tools_text()
    assert text.startswith("# Tools\n\nYou may call one or more functions to assist with the user query.\n\n")
    listed = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    schemas = [json.loads(line) for line in listed]
    assert [schema["function"]["name"] for schema in schemas] == [tool.name for tool in TOOLS]
    assert schemas[1]["function"]["parameters"]["required"] == ["path"]


# The parts of Qwen2.5's published chat template that show tools and write calls.
QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + messages[0]['content'] }}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within " }}
    {{- "<tool_call></tool_call> XML tags:\n<tool_call>\n" }}
    {{- "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages if message.role == "assistant" %}
    {{- '<|im_start|>assistant' }}
    {%- if message.content %}
        {{- '\n' + message.content }}
    {%- endif %}
    {%- for tool_call in message.tool_calls %}
        {{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
        {{- tool_call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}"""


def rendered(messages: list[dict[str, Any]], tools: list[dict[Any, Any] | Callable[..., Any]] | None = None) -> str:
    """As transformers renders for a tokenizer with this template."""
    return str(render_jinja_template([messages], tools=tools, chat_template=QWEN)[0][0])


def test_the_environments_text_is_what_qwens_template_makes_of_tools() -> None:
    ours = [{"role": "system", "content": SYSTEM_PROMPT + tools_text()}]
    theirs = [{"role": "system", "content": SYSTEM_PROMPT.removesuffix("\n\n")}]
    assert rendered(ours) == rendered(theirs, [tool.schema() for tool in TOOLS])


def test_a_demonstrated_call_is_what_qwens_template_writes() -> None:
    arguments: dict[str, object] = {"path": "a.py", "old": "é <'\"\\ ü\n\t", "new": ""}
    function = {"type": "function", "function": {"name": "edit", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [function]}
    written = rendered([{"role": "system", "content": ""}, answer])
    assert written.endswith(f"<|im_start|>assistant\n{render_call(ToolCall('edit', arguments))}<|im_end|>\n")


@pytest.fixture
def tools(backend: BubblewrapBackend, template: Path) -> Iterator[Toolbox]:
    sandbox = backend.open(Template(template), Limits(timeout_s=20, output_bytes=1 << 20))
    yield Toolbox(sandbox, Checkout(Template(template), "", (".", "src")), output_bytes=200, command_s=5.0)
    sandbox.close()


def test_bash(tools: Toolbox) -> None:
    assert tools.bash("echo hello; echo >&2 there; exit 3").text == "hello\nthere\n[exit code 3]"
    assert tools.bash("true").text == "[no output]" and tools.bash("cat").text == "[no output]"
    assert tools.bash("cd /tmp; X=1; echo kept > /workspace/f").ok
    assert tools.bash("pwd; echo $X; cat f").text == "/workspace\n\nkept"

    path = tools.bash("[[ a == a ]] && echo bash; echo $PYTHONPATH").text
    assert path == "bash\n/opt/fresco/site:/workspace:/workspace/src"

    slow = tools.bash("echo begun; sleep 300")
    assert slow.text == "begun\n[killed: ran longer than 5 s]" and not slow.ok


def test_bash_takes_any_script(tools: Toolbox) -> None:
    assert "null character" in tools.bash("a\0b").text
    assert tools.bash(f": {'x' * 300_000}\necho long").text == "long"
    assert tools.bash("echo 'a\\b'; cat <<'X'\n$HOME \"q\"\nX").text == 'a\\b\n$HOME "q"'


def test_long_output_is_cut_in_the_middle(tools: Toolbox) -> None:
    text = tools.bash("printf a%.0s {1..150}; printf z%.0s {1..150}").text
    assert text == f"{'a' * 100}\n[... 100 bytes left out ...]\n{'z' * 100}"

    # The sandbox has cut this one already.
    twice = tools.bash("head -c 3000000 /dev/zero | tr '\\0' x").text
    assert twice == f"{'x' * 100}\n[... {3_000_000 - 200} bytes left out ...]\n{'x' * 100}"


def test_view(tools: Toolbox) -> None:
    tools.bash("seq 300 > numbers; mkdir folder; touch folder/x; : > empty")
    assert tools.view("a.txt", None, None).text == "     1\toriginal"
    assert tools.view("numbers", 299, None).text == "   299\t299\n   300\t300"
    assert tools.view("numbers", 5, 6).text == "     5\t5\n     6\t6\n[294 more lines]"
    assert tools.view("folder", None, None).text == "x"
    for path, message in (("missing", "No such file"), ("empty", "has 0 lines"), ("../etc/shadow", "No such file")):
        answer = tools.view(path, None, None)
        assert message in answer.text and not answer.ok
    assert "has 300 lines; there is none from 400" in tools.view("numbers", 400, 500).text


def test_edit(tools: Toolbox) -> None:
    tools.bash("printf 'one\\ntwo\\ntwo\\n' > f; ln -s /etc/passwd link; mkdir d")
    assert tools.edit("f", "one", "1\t'\"$`\\").ok and tools.bash("head -1 f").text == "1\t'\"$`\\"
    for path, old, message in (
        ("f", "three", "does not occur in f. Nothing was changed"),
        ("f", "two", "occurs 2 times"),
        ("f", "", "exists; old must be"),
        ("g", "x", "does not exist (to create it, leave old empty)"),
        ("d", "x", "cannot be read as a file"),
        ("", "x", "path is empty"),
        ("/usr/x", "", "cannot be written"),
        ("link", "root", "cannot be written"),
    ):
        answer = tools.edit(path, old, "new")
        assert message in answer.text and not answer.ok, (path, answer)

    assert tools.edit("f", "two\ntwo", "2").ok and tools.bash("tail -1 f").text == "2"
    assert tools.edit("new/file", "", "text").text == "new/file created." and tools.bash("cat new/file").text == "text"


def test_work_that_the_host_loses_is_no_empty_diff(backend: BubblewrapBackend, template: Path) -> None:
    """An empty diff would be judged, and earn nothing."""
    sandbox = backend.open(Template(template), Limits())
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        extract_diff(sandbox, "HEAD", 1000)
