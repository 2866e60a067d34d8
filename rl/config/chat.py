"""The configuration's section `chat`: how messages become tokens, and sampled tokens messages again."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from rl.config.section import Section, Where

_VLLM = "vllm:"


class VllmNames(NamedTuple):
    """The names of parsers in vLLM's registries; an empty one: there is none."""

    tool: str
    reasoning: str


class ChatConfig(Section):
    where = "environments with several turns or tools"
    parser: str = "hermes"
    """How tool calls and reasoning are read: `hermes`, `plain`, `vllm:TOOL`, `vllm:TOOL+REASONING`, `vllm:+REASONING`,
    or `package.module:Name` (docs/agents.md)."""
    parse_deadline_s: Annotated[float, Where("parser=vllm:…")] = Field(20.0, gt=0)
    """A turn that is not read after so long stays content; a tenth of it is for the parser alone."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as Qwen3's `enable_thinking`."""
    thinking: Literal["keep", "template"] = "keep"
    """Reasoning of earlier turns in the history: as sampled, or as the template has it, which may begin a new
    sequence."""
    stop: Annotated[list[str], Where("agents")] = Field(default_factory=list)
    """Texts that end an agent's turn, beside those that it asks for itself."""

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
