"""From torch's own words to class, cause and remedy. Texts recorded from torch 2.13 to 2.15; no torch needed."""

import pytest

from ctj_trainer.compile.causes import REMEDIES, Event, EventKind, FaultClass, Place, diagnose, place_in

PLACE = Place(file="/home/a/model/block.py", line=40, function="forward")
GUARD, BREAK, FAILURE, RAISED = EventKind.RECOMPILE, EventKind.GRAPH_BREAK, EventKind.FAILURE, EventKind.RAISED


@pytest.mark.parametrize(
    ("kind", "error", "text", "fault", "said"),
    [
        (
            GUARD,
            "",
            "tensor 'x' size mismatch at index 0. expected 2, actual 3",
            "shape",
            "size of x changes at index 0",
        ),
        (
            GUARD,
            "",
            "x.size()[0] != 256  # if x.shape[0] == 256:  # model/norm.py:38 in forward (_dynamo/tensor.py:3)",
            "shape",
            "the code fixes x.size()[0] != 256 at model/norm.py:38 in forward",
        ),
        (GUARD, "", "GLOBAL_STATE changed: num_threads ", "global_state", "global state changed: num_threads"),
        (
            GUARD,
            "",
            "GLOBAL_STATE changed: autocast(cpu)_enabled num_threads ",
            "autocast",
            "autocast is on in one call",
        ),
        (GUARD, "", "len(self._forward_pre_hooks) == 0", "hook", "_forward_pre_hooks"),
        (GUARD, "", "self.weight.ds_status == 2", "sharded_tensor", "ds_status"),
        (GUARD, "", "scale == 0.5", "input", "an input changes: scale == 0.5"),
        (GUARD, "", "BACKEND_MATCH failure: torch.compile detected different backend callables.", "backend", ""),
        (GUARD, "", "Unexpected recompilation: runtime guards failed even though they passed", "rank_skew", "rank"),
        (RAISED, "AssertionError", "First bucket should be smaller/equal to other buckets", "ddp", "First bucket"),
        (RAISED, "AttributeError", "'float' object has no attribute 'meta'", "ddp", ""),
        (RAISED, "AttributeError", "'autocast' object has no attribute 'prev'", "autocast", "prev"),
        (
            RAISED,
            "RuntimeError",
            "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.",
            "cuda_graphs",
            "overwritten",
        ),
        (FAILURE, "InductorError", "InvalidCxxCompiler: No working C++ compiler found in config", "toolchain", ""),
        (FAILURE, "BackendCompilerFailed", "PTXASError: Internal Triton PTX codegen error", "toolchain", "PTXAS"),
        (FAILURE, "InductorError", "LoweringException: TypeError: unsupported operand", "backend", "Lowering"),
        (FAILURE, "BackendCompilerFailed", "OutOfMemoryError: CUDA out of memory.", "out_of_memory", ""),
        (FAILURE, "NoValidChoicesError", "No choices to select", "out_of_memory", ""),
        (
            FAILURE,
            "BackendCompilerFailed",
            "CppCompileError: C++ compile error: /tmp/torchinductor_a/xy/main.so: file too short",
            "cache",
            "too short",
        ),
        (FAILURE, "OSError", "[Errno 116] Stale file handle", "cache", "Stale"),
        (FAILURE, "TimeoutExpired", "Command 'ptx' timed out after 120 seconds", "timeout", "120 seconds"),
        (RAISED, "RuntimeError", "Watchdog caught collective operation timeout", "rank_skew", ""),
        (
            RAISED,
            "RuntimeError",
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "ddp",
            "",
        ),
        (
            RAISED,
            "CheckpointError",
            "torch.utils.checkpoint: A different number of tensors was saved during the original forward",
            "activation_checkpoint",
            "",
        ),
        (BREAK, "", "function `disable` in torch/_dynamo/decorators.py marked as skipped; fsdp", "sharded_tensor", ""),
        (FAILURE, "SomethingNew", "never seen before", "unknown", "SomethingNew: never seen before"),
    ],
)
def test_recorded_words_get_a_class_and_say_what_and_where(
    kind: EventKind, error: str, text: str, fault: str, said: str
) -> None:
    diagnosis = diagnose(Event(kind=kind, text=text, error=error, place=PLACE))
    assert diagnosis.fault == fault
    assert said in diagnosis.cause
    assert diagnosis.remedy == REMEDIES[diagnosis.fault]
    assert ".py:" in diagnosis.cause
    assert "\n" not in str(diagnosis)


def test_only_a_backward_that_was_compiled_late_comes_out_bare() -> None:
    bare = Event(kind=FAILURE, text="no compiler", error="RuntimeError", is_backward=True)
    assert diagnose(bare).fault is FaultClass.LAZY_BACKWARD
    early = Event(kind=FAILURE, text="no compiler", error="BackendCompilerFailed", is_backward=True)
    assert diagnose(early).fault is FaultClass.TOOLCHAIN


def test_every_class_has_a_remedy() -> None:
    assert set(REMEDIES) == set(FaultClass)


def test_the_innermost_line_that_is_not_torchs_own_is_the_place() -> None:
    stack = (
        'File "/a/model.py", line 7, in forward\n    x = self.norm(x)\n'
        'File "/site-packages/torch/nn/modules/norm.py", line 9, in forward\n'
    )
    assert place_in(stack) == Place(file="/a/model.py", line=7, function="forward")
    assert place_in("nothing") is None
