"""Hardware profiles against the installed torch: what is passed on, torch takes; what it does not know, is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ctj_api.names import ENV_PROFILES_FILE
from ctj_api.spec import Compile, CompileScope, Dynamic
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy
from ctj_trainer.compile.profile import resolve_with_profile
from ctj_trainer.compile.sources import spec_layer
from ctj_trainer.hardware.__main__ import report
from ctj_trainer.hardware.book import Kind, read_book
from ctj_trainer.hardware.detect import detect, this_device
from ctj_trainer.hardware.device import Device
from ctj_trainer.hardware.resolve import Outcome, resolve
from ctj_trainer.hardware.torch_facts import TorchFacts, read_torch_facts

BOOK = read_book({})


@pytest.fixture(scope="module")
def facts() -> TorchFacts:
    return read_torch_facts()


@pytest.mark.parametrize("set_name", ["default", "published"])
@pytest.mark.parametrize("key", list(BOOK.devices))
def test_torch_accepts_what_a_profile_comes_to_and_every_other_flag_is_told(
    set_name: str, key: str, facts: TorchFacts
) -> None:
    entry = BOOK.devices[key]
    device = Device(kind=entry.kind, name=entry.title, multiprocessors=132)
    profile = resolve(f"{set_name}/{key}", book=BOOK, device=device, facts=facts, said={}, precision="bf16")
    accepted = {name: value for name, value in profile.values.items() if name != "dynamic"}
    nn.Linear(1, 1).compile(**accepted)  # checked now; nothing runs
    stated = BOOK.profile(set_name, key)
    assert stated is not None
    if not profile.eager and not stated.states_nothing:
        assert {flag.name for flag in profile.flags} >= set(stated.options)
    told = {flag.name for flag in profile.flags if flag.outcome is Outcome.ABSENT}
    assert told == ({"cubin_cache", "nvfuser_fallback"} if (set_name, key) == ("published", "h100") else set())


def test_facts_are_those_of_this_torch(facts: TorchFacts) -> None:
    assert facts.version == torch.__version__
    assert facts.options["max_autotune"] == "bool"
    assert facts.options["disable_cpp_codegen"] == "bool"
    assert "cubin_cache" not in facts.options
    assert facts.modes["reduce-overhead"] == {"triton.cudagraphs": True}
    assert {"inductor", "eager", "aot_eager"} <= set(facts.backends)


def test_this_machine_s_cpu_is_seen_with_the_cores_it_may_use(facts: TorchFacts) -> None:
    device = this_device(torch.device("cpu"))
    assert device.kind is Kind.CPU
    assert BOOK.entry(device.kind, device.name) == "cpu"
    machine = detect()
    assert machine.processor.cores >= 1
    assert machine.devices


def test_the_answer_for_the_command_line_is_json_and_complete(facts: TorchFacts) -> None:
    answer = report(BOOK, detect(), facts, profile="published", wanted="h100")
    assert json.loads(json.dumps(answer))["resolved"]["name"] == "published/h100"
    assert set(answer["profiles"]) == set(BOOK.devices)
    assert answer["device"] == {"name": "NVIDIA H100", "here": False}


def policy(tmp_path: Path, text: str, profile: str = "default", precision: str = "fp32", **said: Any) -> CompilePolicy:
    """The policy of a job on this CPU, with a platform's profile file."""
    file = tmp_path / "profiles.yaml"
    file.write_text(text)
    layer = spec_layer(Compile.from_document(said))
    environment = {ENV_PROFILES_FILE: str(file)}
    device = torch.device("cpu")
    return resolve_with_profile(layer, profile=profile, device=device, precision=precision, environment=environment)[0]


OURS = "default: {cpu: {options: {shape_padding: true, triton.cudagraphs: true}, dynamic: Static}}"


def test_a_profile_fills_in_what_nobody_said_and_its_origin_is_told(tmp_path: Path) -> None:
    settled = policy(tmp_path, OURS)
    assert settled.options == {"shape_padding": True}
    assert settled.dynamic is Dynamic.STATIC
    assert settled.where("options") == "hardware profile default/cpu"
    assert any("triton.cudagraphs=True: not here" in text for text in settled.notices)


def test_the_spec_goes_over_the_profile(tmp_path: Path) -> None:
    settled = policy(tmp_path, OURS, mode="max-autotune-no-cudagraphs", dynamic="Dynamic")
    assert (settled.mode, settled.options, settled.dynamic) == ("max-autotune-no-cudagraphs", None, Dynamic.DYNAMIC)
    assert settled.where("mode") == "spec.compile.mode"
    assert any("max_autotune is on, against the advice" in text for text in settled.notices)


def test_a_device_that_is_eager_until_measured_is_eager_unless_no_profile_is_asked_for(tmp_path: Path) -> None:
    text = "default: {cpu: {eager: broken here}}"
    settled = policy(tmp_path, text, scope="full")
    assert settled.scope is CompileScope.DISABLED
    assert "hardware profile default/cpu: broken here" in settled.notices
    assert policy(tmp_path, text, profile="none", scope="full").scope is CompileScope.FULL


def test_the_shipped_profile_of_a_cpu_changes_nothing(tmp_path: Path) -> None:
    assert policy(tmp_path, "") == CompilePolicy()
    assert policy(tmp_path, "", scope="disabled", profile="default/h800").scope is CompileScope.DISABLED


def test_a_wrong_device_or_file_is_a_mistake_of_configuration(tmp_path: Path) -> None:
    with pytest.raises(CompileConfigError, match=r"spec\.compile\.profile is 'default/h800'.*there are: a10"):
        policy(tmp_path, "", profile="default/h800")
    with pytest.raises(CompileConfigError, match=r"profiles\.yaml: default\.cpu\.optoins"):
        policy(tmp_path, "default: {cpu: {optoins: {}}}")
