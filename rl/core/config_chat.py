"""The configuration's section `chat`: how messages become tokens, and sampled tokens messages again."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl.core.config_section import Section


class ChatConfig(Section):
    parser: str = "hermes"
    """Reads tool calls and reasoning out of a turn: `hermes` (Qwen2.5, Qwen3), `plain` (all of it is content), or
    `package.module:Name` (rollout/episodes/parsing.py). One that does not fit the chat template is refused."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as Qwen3's `enable_thinking`."""
    thinking: Literal["keep", "template"] = "keep"
    """Reasoning of earlier turns in an agent's history: `keep` it, as sampled, or follow the `template`; where that
    drops it, the history becomes a new sequence."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an agent's turn, beside those that it asks for itself."""
    abort_grace_s: float = Field(5.0, ge=0)
    """A generation whose client has gone ends after so long, unless the client asks again."""
