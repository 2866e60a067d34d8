"""What every section of the configuration is: closed, typed, with help text beside each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )
