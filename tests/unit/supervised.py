"""An attempt message as the deciding side builds it, and the environment of its pod."""

from pathlib import Path

from ctj_api import names
from ctj_api.attempt import Attempt, JobIdentity, Mode, StageWindow
from ctj_api.spec import Compile, Recipe, Stage, Strategy, Training


def an_attempt(
    *, attempt: int = 1, processes: int = 2, nodes: int = 1, ladder: tuple[Strategy, ...] = (Strategy.DDP,)
) -> Attempt:
    stages = [Stage(name=s.value, strategy=s, nodes=nodes, processes_per_node=processes) for s in ladder]
    return Attempt(
        job=JobIdentity(namespace="research", name="tiny", uid="0"),
        attempt=attempt,
        stage=stages[0],
        window=StageWindow(start_step=0, end_step=5, save_at=(5,)),
        ladder=stages,
        floor_step=0,
        mode=Mode.EAGER,
        micro_batch_size=1,
        recipe=Recipe(name="causal_lm"),
        training=Training(steps=5, global_batch_size=4, micro_batch_size=1),
        compile=Compile(),
    )


def environment_of(attempt: Attempt, folder: Path, *, node: int = 0, port: int = 0) -> dict[str, str]:
    return {
        names.ENV_ATTEMPT: attempt.model_dump_json(by_alias=True, exclude_none=True),
        names.ENV_CONTROL_FILE: str(folder / "control.json"),
        names.ENV_CHECKPOINT_ROOT: str(folder / "checkpoints"),
        names.ENV_CACHE_DIR: str(folder / "cache"),
        names.ENV_RUN_DIR: str(folder / "run"),
        names.ENV_TERMINATION_FILE: str(folder / "termination.json"),
        names.ENV_NODE_RANK: str(node),
        names.ENV_MASTER_ADDR: "127.0.0.1",
        names.ENV_MASTER_PORT: str(port),
    }
