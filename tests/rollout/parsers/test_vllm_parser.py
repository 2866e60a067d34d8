"""vLLM's own parsers beside the original templates: what a template writes comes back, and what does not is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.gateway.tokenizers import make_folder
from rl.config.chat import ChatConfig
from rl.config.schema import ConfigError, load_config
from rl.wire.messages import ClientHello, Message, ParseTurn, ProtocolError, Stop, encode
from rl.wire.process import Process
from rl.wire.run import ProcessContext
from rollout.episodes.parsing import ParsedTurn, make_parser
from rollout.episodes.tokenizer import ChatTokenizer
from rollout.parsers import process
from rollout.parsers.fitting import _TOOLS, ParserRefused, fitting_opener
from rollout.parsers.names import check_names, registered
from rollout.parsers.process import Parsers
from rollout.parsers.vllm_parser import VllmParser
from tests.conftest import MakeRun

HERMES = '<tool_call>\n{"name": "probe", "arguments": {"count": 1, "word": "two words"}}\n</tool_call>'
LLAMA = '{"name": "probe", "parameters": {"count": 1, "word": "two words"}}'
QWEN_XML = (
    "<tool_call>\n<function=probe>\n<parameter=count>\n1\n</parameter>\n<parameter=word>\ntwo words\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>probe\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n<arg_key>word</arg_key>\n"
    "<arg_value>two words</arg_value>\n</tool_call>"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>probe\n```json\n"
    '{"count": 1, "word": "two words"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
FITTING = [
    # template, parser, a call as the model samples it
    ("qwen3", "vllm:hermes", HERMES),
    ("qwen3", "vllm:hermes+deepseek_r1", HERMES),
    ("qwen3", "vllm:hermes+qwen3", HERMES),
    ("qwen2_5", "vllm:hermes", HERMES),
    ("llama3_1", "vllm:llama3_json", LLAMA),
    ("glm4moe", "vllm:glm45+glm45", GLM),
    ("nemotron_3_nano", "vllm:qwen3_coder+deepseek_r1", QWEN_XML),  # its prompts open the thinking
    ("nemotron_3_nano", "vllm:qwen3_xml+qwen3", QWEN_XML),
    ("deepseekv3", "vllm:deepseek_v3+deepseek_r1", DEEPSEEK),  # and it drops the thinking of earlier turns
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def folder_of(base: Path, template: str) -> Path:
    return base / template if (base / template).exists() else make_folder(template, base / template)


def made(base: Path, template: str, parser: str, **options: bool) -> tuple[VllmParser, str]:
    chat = ChatConfig(parser=parser, template_options=options)
    folder = folder_of(base, template)
    found = VllmParser(chat, folder)
    return found, fitting_opener(found.parse, found.marks, chat, ChatTokenizer(folder, options))


def read(parser: VllmParser, text: str) -> ParsedTurn:
    return parser.parse(text, json.dumps(_TOOLS))


@pytest.mark.parametrize(("template", "parser", "call"), FITTING)
def test_calls_and_reasoning_come_back(base: Path, template: str, parser: str, call: str) -> None:
    found, opener = made(base, template, parser)
    thinks = "+" in parser
    parsed = read(found, f"{'<think>why</think>' if thinks else ''}{call}")
    ((name, arguments),) = parsed.calls
    assert (name, json.loads(arguments)) == ("probe", {"count": 1, "word": "two words"})  # typed by the tool's schema
    assert (parsed.reasoning, parsed.content) == ("why" if thinks else "", "")
    assert opener == ("<think>" if thinks else "")

    cut = read(found, call[: len(call) // 2])
    assert not cut.calls or "two words" not in cut.calls[0][1]
    assert read(found, f"{opener}{'why</think>' if thinks else ''}plain words").content == "plain words"
    assert not found.parse(call, "[]").calls  # without tools vLLM reads none


def test_a_thought_that_the_prompt_opened_is_reasoning_also_where_it_is_cut(base: Path) -> None:
    found, opener = made(base, "nemotron_3_nano", "vllm:qwen3_coder+deepseek_r1")
    assert read(found, opener + "I wonder") == ParsedTurn("", "I wonder")
    closed, _ = made(base, "qwen3", "vllm:hermes+qwen3", enable_thinking=False)
    assert read(closed, "no thought") == ParsedTurn("no thought")


@pytest.mark.parametrize(
    ("template", "parser", "reason"),
    [
        ("qwen3", "vllm:qwen3_xml", "does not read '<tool_call>"),
        ("nemotron_3_nano", "vllm:hermes", "does not read"),
        ("gemma", "vllm:pythonic", "the chat template refuses messages of roles"),
        ("deepseek_r1_distill", "vllm:hermes+deepseek_r1", "does not read"),  # the template writes no calls
    ],
)
def test_refused_where_the_template_writes_something_else(base: Path, template: str, parser: str, reason: str) -> None:
    with pytest.raises(ParserRefused) as refused:
        made(base, template, parser)
    line = str(refused.value)
    assert line.startswith(f"chat.parser='{parser}': ") and reason in line and "'plain'" in line and "\n" not in line


@pytest.mark.parametrize(
    ("template", "parser", "reason"),
    [
        ("qwen3", "vllm:llama3_json", "could not locate the bot token"),
        ("llama3", "vllm:hermes+deepseek_r1", "could not locate think start/end tokens"),
        ("qwen3", "vllm:hf+deepseek_r1", "cannot be combined"),
        ("cohere2", "vllm:+cohere_command3", "cohere_melody"),
    ],
)
def test_refused_where_the_vocabulary_lacks_its_tokens(
    base: Path, make_run: MakeRun, template: str, parser: str, reason: str
) -> None:
    run = make_run(f"chat.parser={parser}", model_folder=folder_of(base, template))
    with pytest.raises(ParserRefused, match=reason) as refused:
        process.make_parser(run)
    assert "\n" not in str(refused.value)


def test_names_are_those_of_the_installed_package() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert registered("tool") == tuple(sorted(ToolParserManager.lazy_parsers))
    assert registered("reasoning") == tuple(sorted(ReasoningParserManager.lazy_parsers))
    for parser in ("vllm:hermes", "vllm:hermes+qwen3", "vllm:+deepseek_r1", "hermes", "mine:Parser"):
        check_names(ChatConfig(parser=parser))


@pytest.mark.parametrize(
    ("parser", "reason"),
    [
        ("vllm:hermess", r"no tool parser 'hermess'; did you mean 'hermes'\?; it has .*, llama3_json, "),
        ("vllm:hermes+qwen33", "no reasoning parser 'qwen33'.* it has .*deepseek_r1"),
        ("vllm:+", "no parser is named; write vllm:TOOL"),
    ],
)
def test_unknown_names_are_refused_in_one_line(parser: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check_names(load_config(None, [f"chat.parser={parser}"]).chat)
    assert str(refused.value).startswith(f"chat.parser='{parser}': ") and "\n" not in str(refused.value)


def test_without_a_run_there_is_no_process_of_parsers() -> None:
    with pytest.raises(ConfigError, match="vllm:hermes"):
        make_parser("vllm:hermes")


@pytest.fixture
def parsers(base: Path, make_run: MakeRun) -> Iterator[Parsers]:
    run = make_run("chat.parser=vllm:hermes", "chat.parse_deadline_s=3", model_folder=folder_of(base, "qwen3"))
    made = Parsers(Process("parsers", ProcessContext(run, 0, 0)), *process.make_parser(run))
    yield made
    made.close()


def test_what_is_no_question_of_an_environment_server_is_dropped(parsers: Parsers) -> None:
    strange: list[tuple[Message, bytes]] = [
        (ParseTurn(1, "a", "[]"), b"env_server.9.0"),
        (Stop("forged"), b"env_server.0.0"),
    ]
    for message, peer in strange:
        with pytest.raises(ProtocolError):
            parsers._from_client(message, peer)
    parsers._from_client(ClientHello(0, 0), b"env_server.0.0")  # it has gone: nobody is answered


def test_a_hostile_turn_ends_after_its_time(parsers: Parsers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the parser catches every Exception."""
    import regex

    def catastrophic(text: str, tools: str) -> ParsedTurn:
        while True:
            try:
                regex.search(r"(a|aa)+$", text)
            except Exception:
                continue

    good = parsers._parser.parse
    monkeypatch.setattr(parsers._parser, "parse", catastrophic)
    begin = time.monotonic()
    parsed = parsers._parsed(ParseTurn(3, "a" * 80 + "b", "[]"))
    assert time.monotonic() - begin < 2
    assert parsed.request_id == 3 and parsed.failed == "the parser took longer than 0.3 s" and not parsed.content

    monkeypatch.setattr(parsers._parser, "parse", good)
    half = HERMES.replace("two", "\\ud800")
    for text in (HERMES, half):
        answer = parsers._parsed(ParseTurn(4, text, json.dumps(_TOOLS)))
        assert answer.calls and encode(answer)
    assert parsers._parsed(ParseTurn(5, HERMES, "no json")).failed.startswith("the parser raised JSONDecodeError")
    assert parsers._parsed(ParseTurn(6, HERMES, '[{"type": 1}]')).failed.startswith("the parser raised ValidationError")


def test_what_nobody_waits_for_is_not_read(parsers: Parsers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what has waited too long behind others, nor anything more once the run ends."""
    asked: list[str] = []

    def parse(text: str, tools: str) -> ParsedTurn:
        asked.append(text)
        parsers._process.stopping = True
        return ParsedTurn(text)

    monkeypatch.setattr(parsers._parser, "parse", parse)
    for deadline_s, text in ((-1.0, "late"), (60.0, "in time"), (60.0, "at the end")):
        monkeypatch.setattr(parsers, "_deadline_s", deadline_s)
        parsers._from_client(ParseTurn(7, text, "[]"), b"env_server.0.0")
    parsers.serve()
    assert asked == ["in time"]
