"""Rules over several fields of a job, as data: CEL that the API server runs at admission, and `validate.py` locally.

Only what both evaluators know: core CEL, and `format` with `%s`. A message reads `what must hold; what to do`.
"""

from dataclasses import dataclass
from typing import Any

from ctj_api.names import MAX_JOB_AND_STAGE
from ctj_api.schema import RULES


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One CEL rule and how its violation is explained."""

    at: str
    """Where `self` is: names joined by dots, `[]` for every item; empty for the whole object."""
    cel: str
    message: str
    message_cel: str = ""
    """Replaces `message` where the numbers of the object at hand help; `message` is left if it cannot be evaluated."""
    field: str = ""
    """Path below `at` that the problem is about."""

    @property
    def is_transition(self) -> bool:
        """Whether the rule compares with the stored object, and so only applies to updates."""
        return "oldSelf" in self.cel

    def to_document(self) -> dict[str, str]:
        """Return the entry of `x-kubernetes-validations`."""
        document = {"rule": self.cel, "message": self.message}
        if self.message_cel:
            document["messageExpression"] = self.message_cel
        if self.field:
            document["fieldPath"] = "." + self.field
        return document


def _processes(stage: str) -> str:
    """CEL: processes on each node of `stage`."""
    return (
        f"(has({stage}.gpusPerNode) ? {stage}.gpusPerNode"
        f" : (has({stage}.processesPerNode) ? {stage}.processesPerNode : 1))"
    )


def _text(template: str, *values: str) -> str:
    """CEL: `template` with each `%s` replaced; values are CEL of strings.

    Formatting is the one extension function we use: the API server cannot bound the length of `string(number)`, and
    refuses to add anything to it.
    """
    return f"'{template}'.format([{', '.join(values)}])"


def _unchanged(field: str) -> Rule:
    """Part of what a run is: another value would make its checkpoints and its evidence meaningless."""
    return Rule(
        at="spec",
        cel=f"self.{field} == oldSelf.{field}",
        message="must not change once the job exists; create a job of another name",
        message_cel=_text("must stay %s once the job exists; create a job of another name", f"string(oldSelf.{field})"),
        field=field,
    )


def _sum_of_steps() -> str:
    """CEL: steps of all canary windows (core CEL has no sum, and a ladder has at most four stages)."""
    return " + ".join(
        f"(size(self.ladder) > {index} && has(self.ladder[{index}].steps) ? self.ladder[{index}].steps : 0)"
        for index in range(4)
    )


def _working_batches() -> str:
    """CEL: text that names the batch sizes around the present one that every stage can divide.

    The least common multiple of all stages' groups is looked for among the first 16 multiples of the largest; in
    practice worlds divide each other, and it is the largest. CEL has no variables: `[value].map(name, ...)[0]` names
    one.
    """
    factors = [*range(1, 17)]
    below, above = f"{_BATCH} / unit * unit", f"({_BATCH} / unit + 1) * unit"
    both = _text("use %s or %s", f"string({below})", f"string({above})")
    choice = f"{_BATCH} < unit ? {_text('use %s', 'string(unit)')} : {both}"
    return (
        f"[self.ladder.map(stage, {_GROUP}).filter(group, self.ladder.all(stage, {_GROUP} <= group))[0]].map(largest,"
        f" ({factors}.map(factor, factor * largest).filter(unit, self.ladder.all(stage, unit % {_GROUP} == 0))"
        f".map(unit, {choice}) + ['use a common multiple of every stage'])[0])[0]"
    )


_BATCH = "self.training.globalBatchSize"
_GROUP = f"(self.training.microBatchSize * stage.nodes * {_processes('stage')})"
_RANK = "{'single': 0, 'ddp': 1, 'fsdp': 2, 'zero3': 3}"

_TOO_LONG = f"size(self.metadata.name) + size(stage.name) > {MAX_JOB_AND_STAGE}"
_NAME = (
    Rule(
        at="",
        cel="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        message="must be lower-case letters, digits and dashes, from a letter to a letter or digit; rename the job",
        field="metadata.name",
    ),
    Rule(
        at="",
        cel=f"!self.spec.ladder.exists(stage, {_TOO_LONG})",
        message=f"job name and stage name may have {MAX_JOB_AND_STAGE} characters together; shorten one of them",
        message_cel=f"self.spec.ladder.filter(stage, {_TOO_LONG}).map(stage, "
        + _text(
            'may have %s characters beside stage "%s", so that pods get valid host names; shorten one of the names',
            f"string({MAX_JOB_AND_STAGE} - size(stage.name))",
            "stage.name",
        )
        + ")[0]",
        field="metadata.name",
    ),
)

_NO_WINDOW = "index + 1 < size(self) && !has(self[index].steps)"
_LADDER = (
    Rule(
        at="spec.ladder",
        cel=(
            "[0, 1, 2].all(index, index + 1 >= size(self)"
            f" || {_RANK}[self[index].strategy] < {_RANK}[self[index + 1].strategy])"
        ),
        message="strategies must be in the order single, ddp, fsdp, zero3, each at most once; reorder or remove stages",
    ),
    Rule(
        at="spec.ladder",
        cel=f"![0, 1, 2].exists(index, {_NO_WINDOW})",
        message="every stage but the last must have steps, its canary window; add steps",
        message_cel=f"[0, 1, 2].filter(index, {_NO_WINDOW}).map(index, "
        + _text(
            'every stage but the last must have steps, its canary window; add steps to stage "%s"', "self[index].name"
        )
        + ")[0]",
    ),
    Rule(
        at="spec.ladder",
        cel="size(self) == 0 || !has(self[size(self) - 1].steps)",
        message="the last stage must not have steps, it runs to spec.training.steps; remove them",
        message_cel=_text(
            'the last stage must not have steps, it runs to spec.training.steps; remove them from stage "%s"',
            "self[size(self) - 1].name",
        ),
    ),
    Rule(
        at="spec.ladder",
        cel="size(self) == 0 || !has(self[size(self) - 1].replaySteps)",
        message="the last stage must not have replaySteps, no stage follows that could repeat them; remove them",
    ),
    Rule(
        at="spec.ladder[]",
        cel="!(has(self.gpusPerNode) && has(self.processesPerNode))",
        message="must not be set beside gpusPerNode, which starts one process for each GPU; remove one of the two",
        field="processesPerNode",
    ),
    Rule(
        at="spec.ladder[]",
        cel=f"self.strategy != 'single' || (self.nodes == 1 && {_processes('self')} == 1)",
        message="strategy single must be one process on one node; remove the counts or use ddp, fsdp or zero3",
    ),
    Rule(
        at="spec.ladder[]",
        cel="self.offload == 'None' || self.strategy in ['fsdp', 'zero3']",
        message="must be None for strategies single and ddp, which keep everything whole; use fsdp or zero3",
        field="offload",
    ),
    Rule(
        at="spec.ladder[]",
        cel="self.offload != 'Parameters' || self.strategy != 'fsdp'",
        message="must not be Parameters for fsdp, which moves the optimizer along; use ParametersAndOptimizer",
        field="offload",
    ),
    Rule(
        at="spec.ladder[]",
        cel="!(has(self.replaySteps) && has(self.steps)) || self.replaySteps < self.steps",
        message="must be less than the stage's steps; lower it or lengthen the stage",
        message_cel=_text(
            "must be less than the %s steps of its stage; use at most %s",
            "string(self.steps)",
            "string(self.steps - 1)",
        ),
        field="replaySteps",
    ),
)

_TRAINING = (
    Rule(
        at="spec",
        cel=f"{_sum_of_steps()} < self.training.steps",
        message="must be more than the steps of all canary stages together; raise it or shorten them",
        message_cel=f"[{_sum_of_steps()}].map(total, "
        + _text(
            "must be more than the %s steps of all canary stages together; use at least %s or shorten them",
            "string(total)",
            "string(total + 1)",
        )
        + ")[0]",
        field="training.steps",
    ),
    Rule(
        at="spec",
        cel=f"self.ladder.all(stage, {_BATCH} % {_GROUP} == 0)",
        message="must be a multiple of microBatchSize x processes for every stage; change one of them",
        message_cel=f"self.ladder.filter(stage, {_BATCH} % {_GROUP} != 0).map(stage, "
        + _text(
            'must be a multiple of microBatchSize x processes (%s) for stage "%s"; %s',
            f"string({_GROUP})",
            "stage.name",
            _working_batches(),
        )
        + ")[0]",
        field="training.globalBatchSize",
    ),
    Rule(
        at="spec.training",
        cel="self.optimizer.warmupSteps <= self.steps",
        message="must be at most spec.training.steps; lower it",
        message_cel=_text("must be at most spec.training.steps; use %s or less", "string(self.steps)"),
        field="optimizer.warmupSteps",
    ),
    Rule(
        at="spec.training.evaluation.share",
        cel="double(self) > 0.0 && double(self) <= 0.5",
        message='must be more than 0 and at most 0.5; write for example "0.05"',
    ),
    Rule(
        at="spec.training.optimizer.learningRate",
        cel="double(self) > 0.0",
        message='must be more than 0; write for example "3e-4"',
    ),
    Rule(
        at="spec.training.optimizer.minimumRate",
        cel="double(self) <= 1.0",
        message='must be at most 1, it is a share of learningRate; write for example "0.1"',
    ),
)

_COMPILE = (
    Rule(
        at="spec.compile",
        cel="!(has(self.mode) && has(self.options))",
        message="must not be set beside mode, which is a set of options itself; remove one of the two",
        field="options",
    ),
    Rule(
        at="spec.compile",
        cel="!has(self.options) || !has(self.backend) || self.backend.matches('(?i)^inductor$')",
        message="must not be set for another backend than inductor, which would ignore it; remove one of the two",
        field="options",
    ),
    Rule(
        at="spec.compile",
        cel="!(has(self.dynamicDims) && has(self.dynamic) && self.dynamic == 'Static')",
        message="must not be set beside dynamic Static, which compiles every length anew; remove one of the two",
        field="dynamicDims",
    ),
    Rule(
        at="spec.compile.minSpeedup",
        cel="double(self) > 0.0",
        message='must be more than 0; write for example "1.03"',
    ),
)

_OF_EVALUATION = "gate.source.report == 'evaluationLoss'"
_UNKNOWN_STAGES = "(has(gate.stages) ? gate.stages : []).filter(name, !self.ladder.exists(stage, stage.name == name))"
_GATES = (
    Rule(
        at="spec",
        cel=f"!has(self.gates) || has(self.training.evaluation) || !self.gates.exists(gate, {_OF_EVALUATION})",
        message="must not look at evaluationLoss where nothing is evaluated; set spec.training.evaluation",
        message_cel=f"self.gates.filter(gate, {_OF_EVALUATION}).map(gate, "
        + _text(
            'gate "%s" looks at evaluationLoss, and nothing is evaluated; set spec.training.evaluation', "gate.name"
        )
        + ")[0]",
        field="gates",
    ),
    Rule(
        at="spec.gates[].thresholdRange",
        cel="has(self.min) || has(self.max)",
        message="must have min, max or both; add the limit that the gate checks",
    ),
    Rule(
        at="spec.gates[].thresholdRange",
        cel="!(has(self.min) && has(self.max)) || double(self.min) <= double(self.max)",
        message="must not be more than max; swap the two or correct one",
        field="min",
    ),
    Rule(
        at="spec",
        cel=f"!has(self.gates) || self.gates.all(gate, size({_UNKNOWN_STAGES}) == 0)",
        message="stages of a gate must be names of the ladder; correct or remove them",
        message_cel=f"self.gates.map(gate, {_UNKNOWN_STAGES}.map(name, "
        + _text(
            'gate "%s" is for stage "%s", which must be a stage of the ladder; correct or remove it',
            "gate.name",
            "name",
        )
        + ")).filter(texts, size(texts) > 0)[0][0]",
        field="gates",
    ),
)

_STORE = "(has({0}.training.checkpoint.url) ? {0}.training.checkpoint.url : '')"
_HELD_OUT = "(has({0}.training.evaluation) ? {0}.training.evaluation.share : 'nothing')"

_PASSED_A_STAGE = (
    "has(oldSelf.status) && has(oldSelf.status.ladder) && oldSelf.status.ladder.exists(stage, stage.phase == 'Passed')"
)
_IDENTITY = (
    Rule(
        at="spec.ladder",
        cel=(
            "size(self) == size(oldSelf) && [0, 1, 2, 3].all(index, index >= size(self)"
            " || (self[index].name == oldSelf[index].name && self[index].strategy == oldSelf[index].strategy))"
        ),
        message="stages, their order and strategies must not change once the job exists; create a job of another name",
    ),
    _unchanged("training.globalBatchSize"),
    _unchanged("training.seed"),
    _unchanged("recipe.name"),
    Rule(
        at="spec",
        cel=f"{_STORE.format('self')} == {_STORE.format('oldSelf')}",
        message="must not change once the job exists, its checkpoints lie there; create a job of another name",
        field="training.checkpoint.url",
    ),
    Rule(
        at="spec",
        cel=f"{_HELD_OUT.format('self')} == {_HELD_OUT.format('oldSelf')}",
        message="must hold out the same share once the job exists: what was trained on cannot be evaluated on; "
        "create a job of another name",
        field="training.evaluation",
    ),
    Rule(
        at="",
        cel=f"!({_PASSED_A_STAGE}) || self.spec.training.precision == oldSelf.spec.training.precision",
        message="must not change once a stage has passed; create a job of another name",
        message_cel=_text(
            "must stay %s once a stage has passed; create a job of another name", "oldSelf.spec.training.precision"
        ),
        field="spec.training.precision",
    ),
)

ALL_RULES = (*_NAME, *_LADDER, *_TRAINING, *_COMPILE, *_GATES, *_IDENTITY)


def schema_at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the sub-schema at a rule's path.

    Raises:
        KeyError: no such field.
    """
    for part in filter(None, path.split(".")):
        name = part.removesuffix("[]")
        schema = schema["properties"][name]
        if name != part:
            schema = schema["items"]
    return schema


def add_rules(schema: dict[str, Any]) -> None:
    """Write every rule into the schema of the whole object."""
    for rule in ALL_RULES:
        schema_at(schema, rule.at).setdefault(RULES, []).append(rule.to_document())
