"""Who asked for what? Spec, Accelerate's plugin, environment and YAML, and a hardware profile, put to one policy.

For each value the first that says something wins: spec > plugin > environment > YAML > profile > default. Two switches
stand above all of them, so that a job or script can be run eager without a change: `ACCELERATE_DYNAMO_BACKEND=no` and
torch's own `TORCH_COMPILE_DISABLE=1`. `mode` and `options` exclude each other and count as one value.

The words are Accelerate's (1.15): five `ACCELERATE_DYNAMO_*` variables, `dynamo_config` of its YAML, and the fields of
its TorchDynamoPlugin, with the same meaning. What `accelerate launch` exports without being asked says nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ctj_api.spec import Compile, CompileScope, Dynamic
from ctj_trainer.compile.policy import NO_BACKEND, CompileConfigError, CompilePolicy

PREFIX = "ACCELERATE_DYNAMO_"
VARIABLES = {
    "backend": PREFIX + "BACKEND",
    "mode": PREFIX + "MODE",
    "fullgraph": PREFIX + "USE_FULLGRAPH",
    "dynamic": PREFIX + "USE_DYNAMIC",
    "regional": PREFIX + "USE_REGIONAL_COMPILATION",
}
_YAML_KEYS = {
    "backend": "backend",
    "mode": "mode",
    "use_fullgraph": "fullgraph",
    "use_dynamic": "dynamic",
    "use_regional_compilation": "regional",
}
_TORCH_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_ONE_VALUE = ("mode", "options")
LAUNCH_FORCED = (
    f"{VARIABLES['dynamic']} is False, which accelerate launch exports whether asked or not; it would compile once for "
    "every length, so it counts as unset; where lengths never change, say dynamic: Static in the policy"
)


@dataclass(frozen=True, kw_only=True)
class Said:
    """A value and where it was said."""

    value: Any
    where: str


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one source says, by field of `CompilePolicy`; what it leaves open is the next one's."""

    said: Mapping[str, Said] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], *, where: str) -> "Layer":
        """Build a layer of values that share one origin, such as a hardware profile."""
        return cls(said={name: Said(value=value, where=where) for name, value in values.items()})


def resolve(*layers: Layer | None, switches: Mapping[str, str] | None = None) -> CompilePolicy:
    """Put layers, the strongest first, to one policy. `switches` is the environment that may turn compiling off.

    Raises:
        CompileConfigError: every layer's problems at once.
    """
    given = [layer for layer in layers if layer is not None]
    problems = [text for layer in given for text in layer.problems]
    chosen: dict[str, Said] = {}
    for layer in given:
        open_ones = [name for name in layer.said if name not in chosen]
        if any(name in chosen for name in _ONE_VALUE):
            open_ones = [name for name in open_ones if name not in _ONE_VALUE]
        chosen |= {name: layer.said[name] for name in open_ones}
    try:
        policy = CompilePolicy(
            **{name: said.value for name, said in chosen.items()},
            origins={name: said.where for name, said in chosen.items()},
            notices=tuple(text for layer in given for text in layer.notices),
        )
    except CompileConfigError as error:
        raise CompileConfigError([*problems, *error.problems]) from error
    if problems:
        raise CompileConfigError(problems)
    return switched(policy, switches or {})


def spec_layer(asked: Compile) -> Layer:
    """Read `spec.compile`. A value equal to a default of the schema was perhaps never written, and is that all the
    same: an admitted job has every default written out."""
    fields = {name: getattr(asked, name) for name in _SPEC_FIELDS}
    said = {
        name: Said(value=float(value) if name == "min_speedup" else value, where=f"spec.compile.{_camel(name)}")
        for name, value in fields.items()
        if value is not None and value != Compile.model_fields[name].get_default(call_default_factory=True)
    }
    return Layer(said=said)


def environment_layer(environment: Mapping[str, str]) -> Layer:
    """Read the five variables. All five together come from `accelerate launch`, which sets them for everyone."""
    texts = {name: environment[variable] for name, variable in VARIABLES.items() if environment.get(variable)}
    notices = []
    if is_launched(environment):
        if texts["backend"].lower() == NO_BACKEND:
            return Layer()  # what it exports when nobody asks for a backend
        if _is_false(texts["dynamic"]):
            del texts["dynamic"]
            notices.append(LAUNCH_FORCED)
    layer = _words({VARIABLES[name]: (name, text) for name, text in texts.items()})
    return Layer(said=layer.said, notices=tuple(notices), problems=layer.problems)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process."""
    return all(environment.get(variable) for variable in VARIABLES.values())


def plugin_layer(plugin: Any, environment: Mapping[str, str]) -> Layer:
    """Read a TorchDynamoPlugin. It fills itself from the environment, so what launch forced arrives here too."""
    backend = getattr(plugin.backend, "value", plugin.backend)
    notices: tuple[str, ...] = ()
    where = "TorchDynamoPlugin."
    said: dict[str, Said] = {}
    if str(backend).lower() != NO_BACKEND:
        said["backend"] = Said(value=str(backend), where=where + "backend")
        scope = CompileScope.REGIONAL if plugin.use_regional_compilation else CompileScope.FULL
        said["scope"] = Said(value=scope, where=where + "use_regional_compilation")
    if plugin.disable:
        said["scope"] = Said(value=CompileScope.DISABLED, where=where + "disable")
    forced = plugin.dynamic is False and is_launched(environment) and _is_false(environment[VARIABLES["dynamic"]])
    if forced:
        notices = (LAUNCH_FORCED,)
    elif plugin.dynamic is not None:
        said["dynamic"] = Said(value=plugin.dynamic, where=where + "dynamic")
    given = {"mode": plugin.mode if plugin.mode != "default" else None, "options": plugin.options or None}
    given["fullgraph"] = plugin.fullgraph or None
    said |= {name: Said(value=value, where=where + name) for name, value in given.items() if value is not None}
    return Layer(said=said, notices=notices if said else ())


def yaml_layer(path: Path) -> Layer:
    """Read a file as `accelerate config` writes it: `dynamo_config`, or the older `dynamo_backend` alone.

    Raises:
        CompileConfigError: the file cannot be read.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CompileConfigError([f"{path} is no Accelerate config file: {str(error).splitlines()[0]}"]) from error
    document = document if isinstance(document, dict) else {}
    config = document.get("dynamo_config") or {}
    if "dynamo_backend" in document and not config:
        config = {"dynamo_backend": document["dynamo_backend"]}
    words, problems = {}, []
    for key, value in config.items():
        name = _YAML_KEYS.get(str(key).removeprefix("dynamo_"))
        if name is None:
            allowed = ", ".join("dynamo_" + known for known in _YAML_KEYS)
            problems.append(f"{path}: dynamo_config.{key} is not a known key; must be one of {allowed}")
        else:
            words[f"{path.name}: dynamo_config.{key}"] = (name, str(value))
    layer = _words(words)
    return Layer(said=layer.said, problems=(*problems, *layer.problems))


def _words(texts: Mapping[str, tuple[str, str]]) -> Layer:
    """Read Accelerate's words: `texts` maps where something was said to its name there and its text."""
    said: dict[str, Said] = {}
    problems = []
    for where, (name, text) in texts.items():
        if name in {"backend", "mode"}:
            if text.lower() != "default":
                said[name] = Said(value=text, where=where)
        elif text.lower() not in (*_TRUE, *_FALSE):
            problems.append(f"{where} is {text!r}; must be true or false")
        elif name == "regional":
            scope = CompileScope.FULL if _is_false(text) else CompileScope.REGIONAL
            said["scope"] = Said(value=scope, where=where)
        elif name == "dynamic":
            said[name] = Said(value=Dynamic.STATIC if _is_false(text) else Dynamic.DYNAMIC, where=where)
        else:
            said[name] = Said(value=not _is_false(text), where=where)
    return Layer(said=said, problems=tuple(problems))


def switched(policy: CompilePolicy, environment: Mapping[str, str]) -> CompilePolicy:
    """Let the environment turn compiling off, whatever else was said."""
    where = _switch(environment)
    if not where or not policy.compiles:
        return policy
    notice = f"{where} turns compiling off, whatever else asks for it; unset it to compile"
    return policy.replaced(where=where, notice=notice, scope=CompileScope.DISABLED)


def _switch(environment: Mapping[str, str]) -> str:
    """The variable that turns compiling off, with its value; empty: none does."""
    for name in _TORCH_SWITCHES:
        if environment.get(name) == "1":
            return f"{name}=1"
    value = environment.get(VARIABLES["backend"], "")
    return f"{VARIABLES['backend']}={value}" if value.lower() == NO_BACKEND and not is_launched(environment) else ""


def _is_false(text: str) -> bool:
    return text.lower() in _FALSE


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


_SPEC_FIELDS = (
    "scope",
    "backend",
    "mode",
    "options",
    "dynamic",
    "dynamic_dims",
    "shapes",
    "fullgraph",
    "recompile_limit",
    "keep",
    "min_speedup",
    "fallback",
    "tolerances",
    "timeout_seconds",
)
