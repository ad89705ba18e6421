"""What the installed torch does not know is refused before anything is built: every problem at once, by where it was
said, with what there is."""

import pytest
from accelerate.utils import DynamoBackend

from ctj_api.spec import Compile
from ctj_trainer.compile.installed import check_installed, installed_backends, problems_here
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy
from ctj_trainer.compile.sources import resolve, spec_layer


def test_every_name_of_accelerate_is_taken_or_refused_with_what_is_installed() -> None:
    for member in DynamoBackend:
        for name in (member.value, member.value.lower(), member.value.capitalize()):
            problems = problems_here(CompilePolicy(backend=name))
            if name.lower() in {"no", *installed_backends()}:
                assert not problems
            else:
                assert f"is {name.lower()!r}" in problems[0]
                assert "inductor" in problems[0]
                assert "aot_eager" in problems[0]


def test_a_name_that_accelerate_still_offers_says_what_became_of_it() -> None:
    (problem,) = problems_here(CompilePolicy(backend="nvprims_nvfuser"))

    assert "removed with nvFuser" in problem


def test_options_are_judged_by_name_and_type_all_at_once() -> None:
    asked = Compile(
        options={
            "max_autotun": True,  # a slip
            "cubin_cache": True,  # in an article, in no torch
            "max_autotune": 1,  # torch: "got int should be bool"
            "epilogue-fusion": False,
            "triton.cudagraphs": False,
            "max_recompiles": 4,
        }
    )

    with pytest.raises(CompileConfigError) as caught:
        check_installed(resolve(spec_layer(asked)))

    slip, nothing, wrong = caught.value.problems
    assert "spec.compile.options.max_autotun: no option of torch" in slip
    assert "did you mean max_autotune" in slip
    assert "cubin_cache" in nothing
    assert wrong == "spec.compile.options.max_autotune is 1; must be bool"


def test_backend_and_mode_are_judged_together() -> None:
    with pytest.raises(CompileConfigError) as caught:
        check_installed(CompilePolicy(backend="fast", mode="lite"))

    assert len(caught.value.problems) == 2
    assert "lite" not in caught.value.problems[0]
    assert "backend fast would ignore" in caught.value.problems[1]
    (unknown,) = problems_here(CompilePolicy(mode="max-autotun"))
    assert "did you mean max-autotune" in unknown
    assert not problems_here(CompilePolicy(mode="reduce-overhead"))


def test_a_function_is_a_backend_and_nothing_is_asked_of_a_disabled_policy() -> None:
    assert not problems_here(CompilePolicy(backend=lambda graph, _: graph))
    assert not problems_here(CompilePolicy(scope="disabled", backend="fast"))  # type: ignore[arg-type]
