"""Rules over several fields of a job, as data: CEL that the API server runs at admission and `validate.py` runs locally.

Only what both evaluators know: core CEL, no extension functions. A message reads `what must hold; what to do`.
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


def _unchanged(field: str) -> Rule:
    """Part of what a run is: other values would make its checkpoints and its evidence meaningless."""
    return Rule(
        at="spec",
        cel=f"self.{field} == oldSelf.{field}",
        message="must not change once the job exists; create a job of another name",
        message_cel=f"'must stay ' + string(oldSelf.{field}) + ' once the job exists; create a job of another name'",
        field=field,
    )


_WORLD = f"stage.nodes * {_processes('stage')}"
_GROUP = f"(self.training.microBatchSize * {_WORLD})"
_BATCH = "self.training.globalBatchSize"
_FACTORS = "[" + ", ".join(str(factor) for factor in range(1, 33)) + "]"
# CEL has no variables: `[value].map(name, ...)[0]` names one. Least common multiple of all stages' groups, looked for among
# the first 32 multiples of the largest; in practice worlds divide each other and it is the largest itself.
_WORKING_BATCHES = (
    f"[self.ladder.map(stage, {_GROUP})].map(groups,"
    " [groups.filter(group, groups.all(other, other <= group))[0]].map(largest,"
    f" {_FACTORS}.map(factor, factor * largest).filter(unit, groups.all(group, unit % group == 0)))[0]"
    ").map(units, size(units) == 0 ? 'use a common multiple of every stage'"
    f" : ({_BATCH} < units[0] ? 'use ' + string(units[0])"
    f" : 'use ' + string({_BATCH} / units[0] * units[0]) + ' or ' + string(({_BATCH} / units[0] + 1) * units[0])))[0]"
)
_RANK = "{'single': 0, 'ddp': 1, 'fsdp': 2, 'zero3': 3}"


def _sum_of_steps() -> str:
    """CEL: steps of all canary windows (core CEL has no sum, and a ladder has at most four stages)."""
    return " + ".join(
        f"(size(self.ladder) > {index} && has(self.ladder[{index}].steps) ? self.ladder[{index}].steps : 0)"
        for index in range(4)
    )


_NAME = (
    Rule(
        at="",
        cel="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        message="must be lower-case letters, digits and dashes, starting with a letter and not ending with a dash; rename the job",
        field="metadata.name",
    ),
    Rule(
        at="",
        cel=f"self.spec.ladder.all(stage, size(self.metadata.name) + size(stage.name) <= {MAX_JOB_AND_STAGE})",
        message=f"job name and stage name may have {MAX_JOB_AND_STAGE} characters together; shorten one of them",
        message_cel=(
            f"self.spec.ladder.filter(stage, size(self.metadata.name) + size(stage.name) > {MAX_JOB_AND_STAGE})"
            f".map(stage, 'may have ' + string({MAX_JOB_AND_STAGE} - size(stage.name)) + ' characters with stage \"' + stage.name"
            " + '\", so that its pods get valid host names; shorten the name of the job or of the stage')[0]"
        ),
        field="metadata.name",
    ),
)

_LADDER = (
    Rule(
        at="spec.ladder",
        cel=f"[0, 1, 2].all(index, index + 1 >= size(self) || {_RANK}[self[index].strategy] < {_RANK}[self[index + 1].strategy])",
        message="strategies must come in the order single, ddp, fsdp, zero3, each at most once; reorder or remove stages",
    ),
    Rule(
        at="spec.ladder",
        cel="[0, 1, 2].all(index, index + 1 >= size(self) || has(self[index].steps))",
        message="every stage but the last must have steps, its canary window; add steps",
        message_cel=(
            "[0, 1, 2].filter(index, index + 1 < size(self) && !has(self[index].steps))"
            ".map(index, 'every stage but the last must have steps, its canary window; add steps to stage \"' + self[index].name + '\"')[0]"
        ),
    ),
    Rule(
        at="spec.ladder",
        cel="size(self) == 0 || !has(self[size(self) - 1].steps)",
        message="the last stage must not have steps, it runs to spec.training.steps; remove them",
        message_cel=(
            "'the last stage must not have steps, it runs to spec.training.steps; remove them from stage \"'"
            " + self[size(self) - 1].name + '\"'"
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
        cel="!(has(self.replaySteps) && has(self.steps)) || self.replaySteps < self.steps",
        message="must be less than the stage's steps; lower it or lengthen the stage",
        message_cel="'must be less than the stage\\'s ' + string(self.steps) + ' steps; use at most ' + string(self.steps - 1)",
        field="replaySteps",
    ),
)

_TRAINING = (
    Rule(
        at="spec",
        cel=f"{_sum_of_steps()} < self.training.steps",
        message="must be more than the steps of all canary stages together; raise it or shorten them",
        message_cel=(
            f"'must be more than the ' + string({_sum_of_steps()}) + ' steps of all canary stages together; use at least '"
            f" + string({_sum_of_steps()} + 1) + ' or shorten them'"
        ),
        field="training.steps",
    ),
    Rule(
        at="spec",
        cel=f"self.ladder.all(stage, {_BATCH} % {_GROUP} == 0)",
        message="must be a multiple of microBatchSize x processes for every stage; change one of them",
        message_cel=(
            f"self.ladder.filter(stage, {_BATCH} % {_GROUP} != 0)"
            f".map(stage, 'must be a multiple of microBatchSize x processes (' + string({_GROUP}) + ') for stage \"' + stage.name"
            f" + '\"; ')[0] + {_WORKING_BATCHES}"
        ),
        field="training.globalBatchSize",
    ),
    Rule(
        at="spec.training",
        cel="self.optimizer.warmupSteps <= self.steps",
        message="must be at most spec.training.steps; lower it",
        message_cel="'must be at most spec.training.steps; use ' + string(self.steps) + ' or less'",
        field="optimizer.warmupSteps",
    ),
    Rule(
        at="spec.training.optimizer",
        cel="double(self.learningRate) > 0.0",
        message="must be more than 0; write for example \"3e-4\"",
        field="learningRate",
    ),
    Rule(
        at="spec.training.optimizer",
        cel="double(self.minimumRate) <= 1.0",
        message="must be at most 1, it is a share of learningRate; write for example \"0.1\"",
        field="minimumRate",
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
        cel="!has(self.options) || self.backend == 'inductor'",
        message="must not be set for another backend than inductor, which would ignore it; remove options or the backend",
        field="options",
    ),
    Rule(
        at="spec.compile",
        cel="double(self.minSpeedup) > 0.0",
        message="must be more than 0; write for example \"1.03\"",
        field="minSpeedup",
    ),
)

_GATES = (
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
        cel="!has(self.gates) || self.gates.all(gate, !has(gate.stages) || gate.stages.all(name, self.ladder.exists(stage, stage.name == name)))",
        message="stages of a gate must be names of the ladder; correct or remove them",
        message_cel=(
            "self.gates.filter(gate, has(gate.stages) && gate.stages.exists(name, !self.ladder.exists(stage, stage.name == name)))"
            ".map(gate, 'gate \"' + gate.name + '\" names stage \"'"
            " + gate.stages.filter(name, !self.ladder.exists(stage, stage.name == name))[0]"
            " + '\", which must be a stage of the ladder; correct or remove it')[0]"
        ),
        field="gates",
    ),
)

_PASSED_A_STAGE = "has(oldSelf.status) && has(oldSelf.status.ladder) && oldSelf.status.ladder.exists(stage, stage.phase == 'Passed')"
_IDENTITY = (
    Rule(
        at="spec.ladder",
        cel=(
            "size(self) == size(oldSelf) && [0, 1, 2, 3].all(index, index >= size(self)"
            " || (self[index].name == oldSelf[index].name && self[index].strategy == oldSelf[index].strategy))"
        ),
        message="stages, their order, names and strategies must not change once the job exists; create a job of another name",
    ),
    _unchanged("training.globalBatchSize"),
    _unchanged("training.seed"),
    _unchanged("recipe.name"),
    Rule(
        at="",
        cel=f"!({_PASSED_A_STAGE}) || self.spec.training.precision == oldSelf.spec.training.precision",
        message="must not change once a stage has passed; create a job of another name",
        message_cel="'must stay ' + oldSelf.spec.training.precision + ' once a stage has passed; create a job of another name'",
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
