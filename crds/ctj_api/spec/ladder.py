"""On how many processes does each stage run, and how are parameters laid out over them?"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ctj_api.model import Contract, DnsLabel


class Strategy(StrEnum):
    """How parameters and gradients are laid out over processes, in ladder order."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO3 = "zero3"


class Offload(StrEnum):
    """What lies in the host's memory between its uses, instead of in the accelerator's."""

    NONE = "None"
    PARAMETERS = "Parameters"
    PARAMETERS_AND_OPTIMIZER = "ParametersAndOptimizer"


class Stage(Contract):
    """One rung: a strategy on so many processes, for so many steps."""

    name: Annotated[DnsLabel, Field(max_length=20, description="Part of the name of every Job of this stage.")]
    strategy: Strategy
    steps: Annotated[
        int | None,
        Field(ge=1, le=100_000_000, description="Canary window; absent in the last stage, which runs to the end."),
    ] = None
    nodes: Annotated[int, Field(ge=1, le=1000, description="Pods, one on each node.")] = 1
    gpus_per_node: Annotated[int | None, Field(ge=1, le=64, description="GPUs of each pod, one process for each.")] = (
        None
    )
    processes_per_node: Annotated[
        int | None, Field(ge=1, le=64, description="Processes of each pod where no GPU is asked for; 1 if absent.")
    ] = None
    offload: Offload = Offload.NONE
    replay_steps: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="Last steps that the next stage repeats and compares; min(5, steps / 4) if absent.",
        ),
    ] = None

    @property
    def local_processes(self) -> int:
        """Processes on each node."""
        return self.gpus_per_node or self.processes_per_node or 1

    @property
    def world_size(self) -> int:
        """Processes of the whole stage."""
        return self.nodes * self.local_processes
