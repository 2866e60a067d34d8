"""What every section of the configuration is: closed, typed, with help text beside each field."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Floats are finite, unless a field says otherwise."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_flags(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_flag(cls, str(info.field_name), value)
        return value


def refuse_flag(model: type[BaseModel], field: str, value: Any) -> None:
    """Python takes `true` for 1. Raises ValueError where a number is wanted."""
    kind = model.model_fields[field].annotation
    if isinstance(value, bool) and {kind, *get_args(kind)} & {int, float}:
        raise ValueError("a number is wanted here, not true or false")
