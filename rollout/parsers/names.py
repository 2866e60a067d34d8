"""The names of vLLM's parsers, read from the source of the installed package: to import it takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rl.config.chat import ChatConfig
from rl.config.schema import ConfigError, nearest

_TABLES = {
    "tool": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}


@cache
def registered(kind: str) -> tuple[str, ...]:
    """The `tool` or `reasoning` parsers of the installed vLLM. Raises ModuleNotFoundError where there is none."""
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")

    folder, table = _TABLES[kind]
    source = Path(package.submodule_search_locations[0], folder, "__init__.py").read_text()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [table]:
            return tuple(sorted(ast.literal_eval(statement.value)))
    raise LookupError(f"this vLLM has no {table} in vllm.{folder}")


def check_names(chat: ChatConfig) -> None:
    """Raises ConfigError for a parser that vLLM does not have, and ModuleNotFoundError where there is no vLLM."""
    for kind, name in (chat.vllm_names._asdict() if chat.vllm_names else {}).items():
        known = registered(kind)
        if name and name not in known:
            close = nearest(name, list(known))
            raise ConfigError(
                f"chat.parser={chat.parser!r}: vLLM has no {kind} parser {name!r}{close}; it has {', '.join(known)}"
            )
