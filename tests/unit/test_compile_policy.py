"""Who decides how a model is compiled, in whose words, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctj_api.spec import Compile, CompileScope, Dynamic, Fallback, Keep
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy
from ctj_trainer.compile.sources import (
    Layer,
    environment_layer,
    is_launched,
    plugin_layer,
    resolve,
    spec_layer,
    yaml_layer,
)

# What `accelerate launch --dynamo_backend inductor` exports, and what it exports when nothing is asked for.
LAUNCHED = {
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
LAUNCHED_PLAIN = LAUNCHED | {"ACCELERATE_DYNAMO_BACKEND": "NO"}


def plugin(**fields: Any) -> Any:
    """A TorchDynamoPlugin after its own __post_init__."""
    settled = {
        "backend": "INDUCTOR",
        "mode": "default",
        "fullgraph": False,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": False,
    }
    return SimpleNamespace(**(settled | fields))


def test_the_defaults_survive_changing_lengths_and_never_storm() -> None:
    policy = CompilePolicy()

    assert (policy.scope, policy.backend, policy.dynamic) == (CompileScope.REGIONAL, "inductor", Dynamic.AUTO)
    assert not policy.fullgraph
    assert policy.recompile_limit == 8
    assert policy.fallback is Fallback.EAGER


def test_torchs_own_forms_are_taken() -> None:
    assert CompilePolicy(dynamic=True).dynamic is Dynamic.DYNAMIC  # type: ignore[arg-type]
    assert CompilePolicy(dynamic=False).dynamic is Dynamic.STATIC  # type: ignore[arg-type]
    assert CompilePolicy(dynamic=None).dynamic is Dynamic.AUTO  # type: ignore[arg-type]
    assert CompilePolicy(scope="full").scope is CompileScope.FULL  # type: ignore[arg-type]
    assert CompilePolicy(backend="AOT_EAGER").backend == "aot_eager"
    assert CompilePolicy(mode="default").mode is None
    assert not CompilePolicy(backend="No").compiles


@pytest.mark.parametrize("asked", [{"max_recompiles": 3}, {"options": {"max_recompiles": 3}}, {"recompile_limit": 3}])
def test_the_recompile_limit_has_another_name(asked: dict[str, Any]) -> None:
    policy = CompilePolicy(**asked)

    assert policy.recompile_limit == 3
    assert policy.options is None


def test_every_contradiction_is_named_at_once() -> None:
    with pytest.raises(CompileConfigError) as caught:
        CompilePolicy(
            scope="blocks",  # type: ignore[arg-type]
            mode="lite",
            options={"max_autotune": True},
            dynamic="Static",  # type: ignore[arg-type]
            dynamic_dims={"tokens": (1,)},
            recompile_limit=4,
            max_recompiles=5,
            min_speedup=0,
        )

    said = "\n".join(caught.value.problems)
    for part in (
        "'blocks'; must be one of regional, full, disabled",
        "beside options",
        "[4, 5]",
        "beside dynamic_dims",
    ):
        assert part in said
    assert "min_speedup is 0" in said
    assert len(caught.value.problems) == 5


def test_each_value_comes_from_the_strongest_source_that_names_it(tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text("dynamo_config: {dynamo_backend: AOT_EAGER, dynamo_use_fullgraph: true, dynamo_mode: lite}\n")

    policy = resolve(
        spec_layer(Compile(recompile_limit=3, keep=Keep.IF_CORRECT)),
        plugin_layer(plugin(backend="EAGER", use_regional_compilation=True), {}),
        environment_layer({"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_DYNAMO_USE_DYNAMIC": "yes"}),
        yaml_layer(config),
        Layer.of({"min_speedup": 1.1, "fullgraph": False, "backend": "tvm"}, where="profile h100"),
    )

    origins = {
        "recompile_limit": "spec.compile.recompileLimit",
        "keep": "spec.compile.keep",
        "backend": "TorchDynamoPlugin.backend",
        "scope": "TorchDynamoPlugin.use_regional_compilation",
        "dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
        "mode": "accelerate.yaml: dynamo_config.mode",
        "fullgraph": "accelerate.yaml: dynamo_config.use_fullgraph",
        "min_speedup": "profile h100",
        "timeout_seconds": "default",
    }
    assert {name: policy.where(name).replace("dynamo_config.dynamo_", "dynamo_config.") for name in origins} == origins
    assert (policy.backend, policy.dynamic, policy.mode, policy.fullgraph) == ("eager", Dynamic.DYNAMIC, "lite", True)
    assert policy.to_document()["backend"] == {"value": "eager", "from": "TorchDynamoPlugin.backend"}
    assert sum("TorchDynamoPlugin.backend" in line for line in policy.lines()) == 1


def test_a_mode_hides_the_options_of_weaker_sources() -> None:
    policy = resolve(
        environment_layer({"ACCELERATE_DYNAMO_MODE": "reduce-overhead"}),
        Layer.of({"options": {"max_autotune": True}}, where="profile"),
    )

    assert (policy.mode, policy.options) == ("reduce-overhead", None)


def test_what_launch_forces_is_noticed_corrected_and_reported() -> None:
    """`accelerate launch` exports USE_DYNAMIC=False for everyone: one compile per length (accelerate#4254)."""
    for layer in (environment_layer(LAUNCHED), plugin_layer(plugin(dynamic=False), LAUNCHED)):
        policy = resolve(layer)
        assert policy.dynamic is Dynamic.AUTO
        assert policy.compiles
        assert "accelerate launch exports whether asked or not" in policy.notices[0]
        assert "notice:" in policy.lines()[-1]


def test_a_static_that_somebody_said_stays_static() -> None:
    by_hand = {"ACCELERATE_DYNAMO_USE_DYNAMIC": "False"}

    assert not is_launched(by_hand)
    assert resolve(environment_layer(by_hand)).dynamic is Dynamic.STATIC
    assert resolve(plugin_layer(plugin(dynamic=False), {})).dynamic is Dynamic.STATIC


def test_launching_without_a_backend_says_nothing_about_compiling() -> None:
    assert resolve(environment_layer(LAUNCHED_PLAIN), switches=LAUNCHED_PLAIN) == CompilePolicy()


@pytest.mark.parametrize(
    "switch", [{"ACCELERATE_DYNAMO_BACKEND": "no"}, {"TORCH_COMPILE_DISABLE": "1"}, {"TORCHDYNAMO_DISABLE": "1"}]
)
def test_the_environment_turns_compiling_off_without_a_change_of_code(switch: dict[str, str]) -> None:
    policy = resolve(spec_layer(Compile(scope=CompileScope.FULL, backend="inductor")), switches=switch)

    assert not policy.compiles
    assert next(iter(switch)) in policy.where("scope")
    assert "turns compiling off" in policy.notices[0]


def test_a_plugin_means_what_it_means_to_accelerate() -> None:
    assert resolve(plugin_layer(plugin(), {})).scope is CompileScope.FULL
    assert resolve(plugin_layer(plugin(disable=True), {})).scope is CompileScope.DISABLED
    assert resolve(plugin_layer(plugin(backend="NO"), {})) == CompilePolicy()
    options = resolve(plugin_layer(plugin(options={"max_autotune": True}, fullgraph=True), {}))
    assert (options.options, options.fullgraph) == ({"max_autotune": True}, True)


def test_bad_words_are_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text("dynamo_config: {dynamo_speed: 11, dynamo_use_dynamic: maybe}\n")

    with pytest.raises(CompileConfigError) as caught:
        resolve(environment_layer({"ACCELERATE_DYNAMO_USE_FULLGRAPH": "none"}), yaml_layer(config))

    said = "\n".join(caught.value.problems)
    assert "ACCELERATE_DYNAMO_USE_FULLGRAPH is 'none'; must be true or false" in said
    assert "dynamo_config.dynamo_speed is not a known key; must be one of dynamo_backend, dynamo_mode" in said
    assert "'maybe'; must be true or false" in said


def test_the_older_yaml_with_a_backend_alone_is_read(tmp_path: Path) -> None:
    config = tmp_path / "old.yaml"
    config.write_text("dynamo_backend: AOT_EAGER\n")

    assert resolve(yaml_layer(config)).backend == "aot_eager"
    config.write_text("dynamo_backend: 'NO'\n")
    assert not resolve(yaml_layer(config)).compiles


def test_a_job_that_leaves_values_open_is_settled() -> None:
    asked = Compile(keep=Keep.IF_CORRECT)

    settled = resolve(spec_layer(asked), environment_layer({"ACCELERATE_DYNAMO_BACKEND": "EAGER"})).as_settings(asked)

    assert (settled.scope, settled.backend, settled.dynamic) == (CompileScope.REGIONAL, "eager", Dynamic.AUTO)
    assert settled.keep is Keep.IF_CORRECT


def test_equal_policies_have_one_fingerprint() -> None:
    assert CompilePolicy(backend="EAGER").fingerprint() == CompilePolicy(backend="eager").fingerprint()
    assert CompilePolicy(mode="lite").fingerprint() != CompilePolicy().fingerprint()
    assert CompilePolicy().replaced(where="here", mode="lite").where("mode") == "here"
