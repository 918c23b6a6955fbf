"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strict model: nothing is converted silently and unknown fields are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, populate_by_name=True
    )
