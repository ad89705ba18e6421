"""One stage as a test runs it in every rank of a pair: an attempt message in, the report and the records out."""

import itertools
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.distributed_c10d import _get_default_store

from ctj_api.attempt import Attempt
from ctj_api.names import attempt_folder
from ctj_trainer.compile.board import CompileBoard
from ctj_trainer.ranks import Ranks
from ctj_trainer.records import read_records
from ctj_trainer.requests import Requests
from ctj_trainer.scene import Scene
from ctj_trainer.stage import run_stage
from ctj_trainer.telemetry import telling


def run(document: dict[str, Any], root: str, name: str = "run") -> dict[str, Any]:
    """Run the stage on this rank; what it left behind, as plain values."""
    torch._dynamo.reset()
    _register_backends()
    compilations.clear()
    message = Attempt.from_document(document)
    run_dir = Path(root) / name
    run_dir.mkdir(exist_ok=True, parents=True)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    requests = Requests(attempt=message.attempt, control_file=run_dir / "control.json", run_dir=run_dir)
    try:
        folder = Path(root) / attempt_folder(message.attempt)
        with telling(message, run_dir=run_dir, folder=folder, ranks=everyone()) as telemetry:
            scene = Scene(
                attempt=message,
                root=Path(root),
                run_dir=run_dir,
                ranks=everyone(),
                telemetry=telemetry,
                requests=requests,
            )
            stopped = run_stage(scene)
    finally:
        signal.signal(signal.SIGTERM, handlers[0])
        signal.signal(signal.SIGINT, handlers[1])
    return {"stopped": stopped, "records": {s: r.to_document() for s, r in read_records(folder).items()}}


@cache
def everyone() -> Ranks:
    return Ranks(
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=dist.get_world_size(),
        device=torch.device("cpu"),
        control=dist.new_group(backend="gloo"),
        board=CompileBoard(
            _get_default_store(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        ),
    )


@cache
def _register_backends() -> None:
    for name, backend in (
        ("fails_forward", fails),
        ("fails_at_run_time", fails_at_run_time),
        ("fails_on_rank_1", fails_on_rank_1),
        ("fails_backward", aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=fails)),
        ("wrong_forward", aot_autograd(fw_compiler=wrong, bw_compiler=lambda graph, _: graph)),
        ("no_number_after_20", no_number_after_20),
        ("slow_on_rank_1", slow_on_rank_1),
        ("inductor_third_fails", inductor_third_fails),
        *((f"fails_{part}_{nth}_{on}", failing(part, nth=nth, on=on)) for part, nth, on in FAILURES),
        (
            "memory_forward_3_all",
            failing("forward", nth=3, on="all", error=torch.OutOfMemoryError("CUDA out of memory")),
        ),
    ):
        register_backend(backend, name=name)


FAILURES = [(part, nth, on) for part in ("forward", "backward") for nth in (1, 3, 4) for on in ("all", "one")]
compilations: Counter[str] = Counter()


def failing(part: str, *, nth: int, on: str, error: Exception | None = None) -> Any:
    """A backend that changes nothing and raises in the forward or backward of its n-th graph, everywhere or on one
    rank."""

    def compiler(name: str) -> Callable[..., Any]:
        def compile_part(graph: Any, _: Any) -> Any:
            compilations[name] += 1
            if name == part and compilations[name] == nth and (on == "all" or dist.get_rank() == 1):
                raise error or RuntimeError("no compiler\nin this image")
            return make_boxed_func(graph)

        return compile_part

    return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))


def inductor_third_fails(graph: Any, inputs: Any) -> Any:
    """Inductor, without a compiler for the third graph on rank 1."""
    from torch._inductor.compile_fx import compile_fx

    compilations["inductor"] += 1
    if compilations["inductor"] == 3 and dist.get_rank() == 1:
        fails()
    return compile_fx(graph, inputs)


def slow_on_rank_1(graph: Any, inputs: Any) -> Any:
    time.sleep(3.0 * dist.get_rank())
    return graph


def no_number_after_20(graph: Any, inputs: Any) -> Any:
    """After twenty calls: when the probe and the first steps are over."""
    calls = itertools.count()

    def run_graph(*arguments: Any) -> Any:
        outputs = graph(*arguments)
        return tuple(out * math.nan for out in outputs) if next(calls) > 20 else outputs

    return run_graph


def fails(*_: Any) -> Any:
    raise RuntimeError("no compiler\nin this image")


def fails_on_rank_1(graph: Any, inputs: Any) -> Any:
    return fails() if dist.get_rank() == 1 else graph


def fails_at_run_time(graph: Any, inputs: Any) -> Any:
    """After twenty calls: when the probe and the first steps are over."""
    calls = itertools.count()

    def run_graph(*arguments: Any) -> Any:
        if next(calls) > 20:
            raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten")
        return graph(*arguments)

    return run_graph


def wrong(graph: Any, inputs: Any) -> Any:
    return lambda *arguments: tuple(output * 1.001 for output in graph(*arguments))
