"""The configuration's section `chat`: how messages become tokens, and sampled tokens messages again."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from rl.config.section import Section

_VLLM = "vllm:"


class VllmNames(NamedTuple):
    """Of parsers in vLLM's registries; an empty one: there is none."""

    tool: str
    reasoning: str


class ChatConfig(Section):
    parser: str = "hermes"
    """Reads tool calls and reasoning out of a turn: `hermes` (Qwen2.5, Qwen3), `plain` (all of it is content),
    `vllm:TOOL`, `vllm:TOOL+REASONING` or `vllm:+REASONING` (names of vLLM's parsers, which run in a process of their
    own), or `package.module:Name` (rollout/episodes/parsing.py). One that does not fit the chat template is refused."""
    parse_deadline_s: float = Field(20.0, gt=0)
    """vLLM's parsers: a turn that is not read after so long stays content; a tenth of it is for the parser alone."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as Qwen3's `enable_thinking`."""
    thinking: Literal["keep", "template"] = "keep"
    """Reasoning of earlier turns in an agent's history: `keep` it, as sampled, or follow the `template`; where that
    drops it, the history becomes a new sequence."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an agent's turn, beside those that it asks for itself."""
    abort_grace_s: float = Field(5.0, ge=0)
    """A generation whose client has gone ends after so long, unless the client asks again."""

    @property
    def vllm_names(self) -> VllmNames | None:
        """What `parser` names of vLLM; None: it is none of vLLM's."""
        if not self.parser.startswith(_VLLM):
            return None
        tool, _, reasoning = self.parser.removeprefix(_VLLM).partition("+")
        return VllmNames(tool, reasoning)

    @field_validator("parser")
    @classmethod
    def _named(cls, parser: str) -> str:
        if parser.startswith(_VLLM) and not parser.removeprefix(_VLLM).strip("+"):
            raise ValueError("no parser is named; write vllm:TOOL, vllm:TOOL+REASONING or vllm:+REASONING")
        return parser
