"""What is laid over the pods of a job?"""

from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract
from ctj_api.names import GRACE_SECONDS
from ctj_api.spec.shared import FreeForm

FreeList = Annotated[list[FreeForm], Field(max_length=64)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(json_schema_extra={"maxProperties": 64})]


class PodTemplate(Contract):
    """What is laid over the pods the operator builds, in the words of a pod; the trainer's own settings win."""

    labels: Annotated[StringMap | None, Field(description="Added to Job and pods.")] = None
    annotations: Annotated[StringMap | None, Field(description="Added to the pods.")] = None
    node_selector: Annotated[StringMap | None, Field(description="Labels that a node must have.")] = None
    tolerations: Annotated[FreeList | None, Field(description="Taints that are tolerated.")] = None
    affinity: Annotated[FreeForm | None, Field(description="Affinity of the pods.")] = None
    env: Annotated[FreeList | None, Field(description="Environment of the trainer.")] = None
    volumes: Annotated[FreeList | None, Field(description="Volumes of the pod.")] = None
    volume_mounts: Annotated[FreeList | None, Field(description="Mounts of the trainer.")] = None
    resources: Annotated[FreeForm | None, Field(description="Requests and limits of the trainer; GPUs are added.")] = (
        None
    )
    security_context: Annotated[FreeForm | None, Field(description="Security context of the pod.")] = None
    image_pull_secrets: Annotated[FreeList | None, Field(description="Secrets for pulling images.")] = None
    sidecars: Annotated[FreeList | None, Field(description="Containers beside the trainer.")] = None
    service_account_name: Annotated[str | None, Field(max_length=253, description="Account of the pods.")] = None
    scheduler_name: Annotated[str | None, Field(max_length=253, description="Scheduler of the pods.")] = None
    priority_class_name: Annotated[str | None, Field(max_length=253, description="Priority class of the pods.")] = None
    termination_grace_period_seconds: Annotated[
        int | None, Field(ge=1, le=86_400, description="Time to save a checkpoint when a pod is told to stop.")
    ] = None

    @property
    def grace_seconds(self) -> int:
        """Seconds from a polite stop to a kill."""
        return self.termination_grace_period_seconds or GRACE_SECONDS
