"""Hardware profiles against the installed torch: what is passed on, torch takes; what it does not know, is told."""

import json

import pytest
import torch
from torch import nn

from ctj_api.spec import Compile
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
    profile = resolve(f"{set_name}/{key}", book=BOOK, device=device, facts=facts, settings=Compile(), precision="bf16")
    settings = profile.settings
    nn.Linear(1, 1).compile(backend=settings.backend, mode=settings.mode, options=settings.options)  # nothing runs
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
