"""The numbers and the tables that the configuration's schema is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Guidance = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the configuration: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)
