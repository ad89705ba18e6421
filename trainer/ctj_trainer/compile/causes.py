"""Why did the compiler do that? From torch's own words to a class, a cause with file, line and name, and a remedy.

Pure: no torch, no state. One table, first match wins; the patterns are texts of torch 2.15, seen in tests or recorded.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath

CAUSE_LENGTH = 300


class FaultClass(StrEnum):
    """What kind of trouble it is. Also the value of metric labels: few, and never a text from outside."""

    SHAPE = "shape"
    INT_ATTRIBUTE = "int_attribute"
    INPUT = "input"  # value, dtype or layout of an argument
    GLOBAL_STATE = "global_state"
    DATA_DEPENDENT = "data_dependent_flow"
    UNSUPPORTED = "unsupported"
    MISSING_OP = "missing_op"
    SHARDED = "sharded_tensor"  # DTensor, FSDP, ZeRO
    DDP = "ddp"
    HOOK = "hook"
    AUTOCAST = "autocast"
    CHECKPOINTING = "activation_checkpoint"
    CUDA_GRAPHS = "cuda_graphs"
    BACKEND = "backend"  # fusion, lowering, or a chain of backends that gave up
    TOOLCHAIN = "toolchain"
    OUT_OF_MEMORY = "out_of_memory"
    CACHE = "cache"
    RANK_SKEW = "rank_skew"
    TIMEOUT = "timeout"
    LAZY_BACKWARD = "lazy_backward"
    NUMERICS = "numerics"
    SLOW_DOWN = "silent_slow_down"
    MEMORY_PRESSURE = "memory_pressure"
    USER_CODE = "user_code"  # the same error will come in eager
    UNKNOWN = "unknown"


class EventKind(StrEnum):
    """What happened."""

    RECOMPILE = "recompile"
    LIMIT = "limit"
    GRAPH_BREAK = "graph_break"
    FAILURE = "failure"  # while compiling
    RAISED = "raised"  # by compiled code, while it ran


@dataclass(frozen=True, kw_only=True)
class Place:
    """A function in the source, or a line of it."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        short = "/".join(PurePath(self.file).parts[-2:])
        return f"{short}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing the compiler did; `place` is the function it was about, `error` the name of an exception's class."""

    kind: EventKind
    text: str
    error: str = ""
    place: Place | None = None
    is_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Class, cause and remedy, each in one line."""

    fault: FaultClass
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


REMEDIES = {
    FaultClass.SHAPE: "leave spec.compile.dynamic at Auto, pad or bucket this dimension, or raise recompileLimit",
    FaultClass.INT_ATTRIBUTE: "keep it as a tensor (a buffer), or move it out of forward",
    FaultClass.INPUT: "pass the same kind of argument at every call, or a tensor instead of a Python number",
    FaultClass.GLOBAL_STATE: "set it once before the first step, not between steps",
    FaultClass.DATA_DEPENDENT: "compute the number once in the collator, or use torch.where or torch.cond",
    FaultClass.UNSUPPORTED: "move this call out of the region's forward",
    FaultClass.MISSING_OP: "register a fake implementation and an autograd formula (torch.library) for the op",
    FaultClass.SHARDED: "compile blocks, not the wrapped model, so that gathering stays outside the graph",
    FaultClass.DDP: "compile the inner module, not its DDP wrapper; bucket_cap_mb >= 1",
    FaultClass.HOOK: "install hooks before the first step, and leave hooked modules out of regions",
    FaultClass.AUTOCAST: "enter autocast around the model with `with`, and keep float32 islands out of regions",
    FaultClass.CHECKPOINTING: "let checkpointing wrap the block before it is compiled",
    FaultClass.CUDA_GRAPHS: "use mode default or max-autotune-no-cudagraphs",
    FaultClass.BACKEND: "try backend aot_eager to see which part fails, or leave the region eager",
    FaultClass.TOOLCHAIN: "install what is missing in the image (a C++ compiler with Python.h, ptxas)",
    FaultClass.OUT_OF_MEMORY: "a smaller micro batch, and no max-autotune",
    FaultClass.CACHE: "give the compile cache a writable folder of its own per node, and empty it once",
    FaultClass.RANK_SKEW: "warm up every rank on the same shapes; spec.compile.timeoutSeconds is the longest wait",
    FaultClass.TIMEOUT: "compile smaller regions, or raise spec.compile.timeoutSeconds",
    FaultClass.LAZY_BACKWARD: "compile the backward together with the forward, as the guard does",
    FaultClass.NUMERICS: "inductor's emulate_precision_casts, or leave the region eager",
    FaultClass.SLOW_DOWN: "keep: IfFaster, or measure again with `ctj retry-compile`",
    FaultClass.MEMORY_PRESSURE: "a smaller micro batch, or activation checkpointing",
    FaultClass.USER_CODE: "correct it: eager raises it too",
    FaultClass.UNKNOWN: "run once with TORCH_LOGS=+dynamo for torch's own account",
}


@dataclass(frozen=True, kw_only=True)
class _Rule:
    fault: FaultClass
    pattern: re.Pattern[str]
    kinds: frozenset[EventKind]
    says: str = ""
    """How the cause is put, with the pattern's groups; empty: torch's own first words."""


_GUARDS = frozenset({EventKind.RECOMPILE, EventKind.LIMIT})
_ERRORS = frozenset({EventKind.FAILURE, EventKind.RAISED})
_TRACING = frozenset({EventKind.FAILURE, EventKind.RAISED, EventKind.GRAPH_BREAK})
_ANY = frozenset(EventKind)


def _rule(fault: FaultClass, pattern: str, kinds: frozenset[EventKind], says: str = "") -> _Rule:
    return _Rule(fault=fault, pattern=re.compile(pattern, re.IGNORECASE | re.DOTALL), kinds=kinds, says=says)


_F = FaultClass
_RULES = (
    # Guards that failed.
    _rule(
        _F.INT_ATTRIBUTE,
        r"(?P<name>\w+) == (?P<value>-?\d+)\b.*integer attributes of the nn\.Module",
        _GUARDS,
        "integer attribute {name} changes (guarded on {value})",
    ),
    _rule(_F.AUTOCAST, r"GLOBAL_STATE changed: .*autocast", _GUARDS, "autocast is on in one call and off in another"),
    _rule(_F.GLOBAL_STATE, r"GLOBAL_STATE changed: (?P<what>[^\n]+)", _GUARDS, "global state changed: {what}"),
    _rule(_F.GLOBAL_STATE, r"\.training == (?P<value>True|False)", _GUARDS, "train and eval mode alternate"),
    _rule(_F.SHARDED, r"^[^#]*(\bds_\w+|DTensor|fsdp|device_mesh|placements)", _GUARDS),
    _rule(_F.HOOK, r"^[^#]*_(forward|backward)(_pre)?_hooks", _GUARDS),
    _rule(_F.BACKEND, r"BACKEND_MATCH", _GUARDS),
    _rule(_F.RANK_SKEW, r"Unexpected recompilation", _GUARDS, "another rank met something new and all compiled again"),
    _rule(
        _F.SHAPE,
        r"tensor '(?P<name>[^']+)' (?P<what>size|stride|rank) mismatch(?P<rest>[^\n;]*)",
        _GUARDS,
        "{what} of {name} changes{rest}",
    ),
    _rule(
        _F.SHAPE, r"(?P<guard>\S*\.(size|stride)\(\)[^\n#]*|[^\n#]*\bs\d+\b[^\n#]*)", _GUARDS, "the code fixes {guard}"
    ),
    _rule(_F.INPUT, r"(?P<guard>[^\n#]+)", _GUARDS, "an input changes: {guard}"),
    # Failures, the unmistakable ones first.
    _rule(_F.CHECKPOINTING, r"CheckpointError|torch\.utils\.checkpoint: (Recomputed|A different number)", _TRACING),
    _rule(_F.CUDA_GRAPHS, r"CUDAGraph|cudagraph|CUDA graph", _TRACING),
    _rule(_F.OUT_OF_MEMORY, r"OutOfMemory|out of memory|NoValidChoicesError|can't allocate memory", _TRACING),
    _rule(_F.OUT_OF_MEMORY, r"\w+ API call failed", _ERRORS),
    _rule(_F.RANK_SKEW, r"watchdog|collective operation timeout|Timed out waiting", _ERRORS),
    _rule(_F.TIMEOUT, r"TimeoutError|TimeoutExpired|timed out|time limit", _ERRORS),
    _rule(
        _F.CACHE,
        r"pickle data was truncated|Stale file handle|file too short|invalid ELF header|Read-only file system"
        r"|No space left|Errno (28|30|116)|CppCompileError.*(torchinductor|cache)",
        _ERRORS,
    ),
    _rule(
        _F.TOOLCHAIN,
        r"InvalidCxxCompiler|TritonMissing|GPUTooOldForTriton|PTXASError|ptxas|no (working )?(C\+\+ )?compiler"
        r"|Python\.h|CppCompileError|nvcc",
        _ERRORS,
    ),
    _rule(_F.AUTOCAST, r"autocast", _TRACING),
    _rule(
        _F.DDP,
        r"First bucket should be|DDPOptimizer|_dynamo/backends/distributed|'float' object has no attribute 'meta'"
        r"|finished reduction in the prior iteration",
        _TRACING,
    ),
    _rule(_F.MISSING_OP, r"no fake impl registered for <CustomOpDef\((?P<op>[^)]+)\)", _TRACING, "op {op} has no fake"),
    _rule(
        _F.MISSING_OP,
        r"backward through (?P<op>\S+) but no autograd formula",
        _TRACING,
        "op {op} has no autograd formula",
    ),
    _rule(
        _F.MISSING_OP,
        r"no autograd formula|does not support running with fake tensors|UnsupportedOperator|no fake impl",
        _TRACING,
    ),
    _rule(_F.SHARDED, r"fsdp|DTensor|fully_shard|deepspeed|\bds_\w+|set_ ?dtype|\.data assignment", _TRACING),
    _rule(_F.HOOK, r"torch\.compiler\.disable|_(forward|backward)(_pre)?_hook|\bhook", _TRACING),
    _rule(
        _F.DATA_DEPENDENT,
        r"(?P<op>Tensor\.item\(\)|data-dependent branching|nonzero|GuardOnDataDependentSymNode)",
        _TRACING,
        "{op} on a value that is known only at run time",
    ),
    _rule(_F.DATA_DEPENDENT, r"data.dependent|dynamic control flow|unbacked", _TRACING),
    _rule(_F.SHAPE, r"ConstraintViolation|Constraints violated", _TRACING),
    _rule(_F.USER_CODE, r"TorchRuntimeError.*fake tensor", _ERRORS),
    _rule(
        _F.BACKEND, r"BackendCompilerFailed|InductorError|LoweringException|Triton|InternalTorchDynamoError", _ERRORS
    ),
    _rule(_F.UNSUPPORTED, r"Unsupported|", frozenset({EventKind.GRAPH_BREAK})),
    _rule(_F.UNSUPPORTED, r"^Unsupported", _ERRORS),
    _rule(_F.UNKNOWN, r"", _ANY),
)

# "# self.step += 1  # model/block.py:28 in forward": how Dynamo ends a guard. Or a stack, the innermost line last.
_GUARD_SOURCE = re.compile(r"# (?P<code>[^#\n]*?)\s+# (?P<file>\S+?):(?P<line>\d+) in (?P<function>\S+)")
_STACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<function>\S+))?')


def diagnose(event: Event) -> Diagnosis:
    """Name class, cause and remedy of one event."""
    if event.is_backward and event.kind is EventKind.FAILURE and event.error != "BackendCompilerFailed":
        # Torch wraps what a backend raises; only a backward compiled late, in backward itself, comes out bare.
        cause = _with_place(f"{event.error}: {_first_words(event.text)}", event)
        return Diagnosis(fault=_F.LAZY_BACKWARD, cause=cause, remedy=REMEDIES[_F.LAZY_BACKWARD])
    subject = f"{event.error}: {event.text}" if event.error else event.text
    for rule in _RULES:
        found = rule.pattern.search(subject) if event.kind in rule.kinds else None
        if found:
            words = rule.says.format(**found.groupdict()) if rule.says else _first_words(subject)
            return Diagnosis(fault=rule.fault, cause=_with_place(words, event), remedy=REMEDIES[rule.fault])
    raise AssertionError("the last rule matches everything")


def place_in(text: str) -> Place | None:
    """Return the line of source that torch's text points at, if it does; torch's own lines do not count."""
    lines = [found for found in _STACK_LINE.finditer(text) if "/torch/" not in found["file"]]
    found = lines[-1] if lines else _GUARD_SOURCE.search(text)
    if found is None:
        return None
    return Place(file=found["file"], line=int(found["line"]), function=found["function"] or "")


def one_line(text: str) -> str:
    """Collapse white space and cut, for reports and logs."""
    return " ".join(text.split())[:CAUSE_LENGTH]


def count_by_class(diagnoses: Iterable[Diagnosis]) -> dict[FaultClass, int]:
    """How many of each class."""
    counts: dict[FaultClass, int] = {}
    for diagnosis in diagnoses:
        counts[diagnosis.fault] = counts.get(diagnosis.fault, 0) + 1
    return counts


def _with_place(words: str, event: Event) -> str:
    place = place_in(event.text) or event.place
    return one_line(f"{one_line(words.strip(' .'))[: CAUSE_LENGTH - 80]}{f' at {place}' if place else ''}")


def _first_words(text: str) -> str:
    """Torch's message without its hints, explanations and links."""
    return re.split(r"\n\s*(?:Explanation|Hint|Developer debug|Set TORCHDYNAMO|User stack|While executing)", text)[0]
