"""How every object of the contract is declared: frozen, camelCase outside, snake_case inside, nothing unknown accepted.

`spec.py`, `status.py` and the messages build on it; `schema.py` turns such models into the CRD's schema.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

# Numbers that are not integers travel as strings: YAML 1.1 reads `1e-6` as text and `1.0e-6` as a number,
# and the Kubernetes API conventions forbid floats in a spec. Two digits of exponent: more would overflow a double.
_DECIMAL = r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"
_POSITIVE = r"^[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"
_DURATION = r"^([0-9]+(ms|s|m|h))+$"
_DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
RECIPE_NAME = r"^([a-z][a-z0-9_]*|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)$"
PROFILE_NAME = r"^(none|(default|published)(/[a-z0-9]+)?)$"
STORE_URL = r"^[a-z][a-z0-9+.-]*://[^\s]+$"

FORMS = {
    _DECIMAL: ("must be a decimal number in quotes", "1e-6"),
    _POSITIVE: ("must be a decimal number in quotes, not negative", "1e-3"),
    _DURATION: ("must be numbers with units ms, s, m or h", "1h30m"),
    _DNS_LABEL: ("must be lower-case letters, digits and dashes, from a letter to a letter or digit", "canary-1"),
    RECIPE_NAME: ("must be a built-in recipe or module:function", "my_package.recipe:build"),
    PROFILE_NAME: ("must be default, published or none, or with a device as in default/h100", "default"),
    STORE_URL: ("must be a URL of a store", "s3://bucket/checkpoints"),
}
"""What each pattern asks for in words, and an example."""

DecimalString = Annotated[str, Field(pattern=_DECIMAL, max_length=32)]
PositiveDecimalString = Annotated[str, Field(pattern=_POSITIVE, max_length=32)]
DurationString = Annotated[str, Field(pattern=_DURATION, max_length=32)]
FigureString = Annotated[str, Field(pattern=r"^(-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?|NaN|-?Infinity)$", max_length=32)]
DnsLabel = Annotated[str, Field(pattern=_DNS_LABEL, min_length=1, max_length=40)]


class Contract(BaseModel):
    """Base of everything that crosses a process boundary."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid", ser_json_inf_nan="strings"
    )

    def to_document(self) -> dict[str, Any]:
        """Return the plain camelCase document; absent fields stay absent (never null)."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Parse a plain document.

        Raises:
            pydantic.ValidationError: the document does not follow the contract.
        """
        return cls.model_validate(document)
