"""Forms that several parts of the spec use."""

from typing import Annotated, Any

from pydantic import Field

from ctj_api.model import Contract

FreeForm = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
BY_NAME = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
YEAR_SECONDS = 31_536_000


class Volume(Contract):
    """A PersistentVolumeClaim; ctj run keeps everything below its work folder instead."""

    claim_name: Annotated[
        str, Field(min_length=1, max_length=253, description="Name of a claim in the job's namespace.")
    ]
