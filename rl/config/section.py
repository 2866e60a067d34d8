"""What every section of the configuration is: closed, typed, with help text beside each field."""

from __future__ import annotations

import math
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

LARGEST = 1 << 53
"""The largest value of any number: beyond it JSON and other readers of a run would round it, and a message could not
carry it."""
LONGEST_S = 1e9
"""Thirty years: beyond that the kernel's clocks overflow."""


class Where(str):
    """Where a field matters, if not wherever its section does (docs/configuration.md)."""


class Section(BaseModel):
    """Numbers are of a size that can be sent and waited for; floats are finite, unless a field says otherwise."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        allow_inf_nan=False,
    )
    where: ClassVar[str] = ""
    """Who reads the section, or when."""

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_flags(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_flag(cls, str(info.field_name), value)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _numbers_have_bounds(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, int | float) or value == math.inf:
            return value

        name = str(info.field_name)
        is_time = name == "seconds" or (name.endswith("_s") and not name.endswith("_per_s"))
        most = LONGEST_S if is_time else LARGEST
        if abs(value) > most:
            raise ValueError(f"lower it: no number here is larger than {most:g}")
        return value


class NoOptions(Section):
    """The options of a plug-in that has none."""


def refuse_flag(model: type[BaseModel], field: str, value: Any) -> None:
    """Python takes `true` for 1. Raises ValueError where a number is wanted."""
    kind = model.model_fields[field].annotation
    if isinstance(value, bool) and {kind, *get_args(kind)} & {int, float}:
        raise ValueError("a number is wanted here, not true or false")
