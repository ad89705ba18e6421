"""The profile data says all it must; each flag is applied, renamed, absent or refused; the job's own words win."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ctj_api.names import ENV_PROFILES_FILE
from ctj_api.spec import Dynamic
from ctj_trainer.hardware.book import Book, Kind, ProfileFileError, UnknownDeviceError, merged, read_book
from ctj_trainer.hardware.device import Device
from ctj_trainer.hardware.resolve import Outcome, ResolvedProfile, resolve
from ctj_trainer.hardware.torch_facts import TorchFacts

BOOK = read_book({})
DEVICES = ("a10", "a100", "h100", "h200", "b200", "l40s", "rtx4090", "mi300x", "ascend910b", "cpu")
FACTS = TorchFacts(
    version="2.15.0",
    options={
        "triton.cudagraphs": "bool",
        "max_autotune": "bool",
        "max_autotune_gemm": "bool",
        "disable_cpp_codegen": "bool",
        "shape_padding": "bool",
        "use_fast_math": "bool",
        "compile_threads": "",
    },
    modes={"default": {}, "max-autotune": {"max_autotune": True, "triton.cudagraphs": True}},
    backends=("aot_eager", "eager", "inductor"),
)
H100 = Device(kind=Kind.CUDA, name="NVIDIA H100 80GB HBM3", multiprocessors=132, capability=(9, 0))
A100 = Device(kind=Kind.CUDA, name="NVIDIA A100-SXM4-40GB", multiprocessors=108, capability=(8, 0))
SLICE = Device(kind=Kind.CUDA, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", multiprocessors=42, capability=(8, 0))
CPU = Device(kind=Kind.CPU, name="AMD EPYC 7763")
MI300X = Device(kind=Kind.ROCM, name="AMD Instinct MI300X", multiprocessors=304, capability=(9, 4))
ASCEND = Device(kind=Kind.NPU, name="910B4")


def resolved(asked: str, device: Device, *, book: Book = BOOK, precision: str = "bf16", **said: Any) -> ResolvedProfile:
    return resolve(asked, book=book, device=device, facts=FACTS, said=said, precision=precision)


def outcomes(profile: ResolvedProfile) -> dict[str, Outcome]:
    return {flag.name: flag.outcome for flag in profile.flags}


def notices(profile: ResolvedProfile) -> str:
    return "\n".join(profile.notices)


def test_every_device_has_both_profiles_with_a_reason() -> None:
    assert tuple(BOOK.devices) == DEVICES
    for profiles in (BOOK.default, BOOK.published):
        assert set(profiles) == set(DEVICES)
        assert all(profile.why for profile in profiles.values())


def test_the_default_profiles_set_nothing_and_say_what_they_advise() -> None:
    for key, profile in BOOK.default.items():
        assert (profile.options, profile.mode, profile.dynamic) == ({}, "", None), key
        assert profile.dtype in {"bf16", "fp32"}
        assert bool(profile.eager) != (profile.backend == "inductor"), key
        assert all(address.startswith("https://github.com/") for address in profile.evidence)
    measured = {key for key, profile in BOOK.default.items() if profile.measured != "not measured"}
    assert measured == {"cpu"}


def test_every_published_flag_is_there_as_published() -> None:
    cudagraphs = {"triton.cudagraphs": True, "max_autotune": True}
    stated = {
        key: (p.dtype, p.backend, p.fallback_backend, dict(p.options), p.dynamic) for key, p in BOOK.published.items()
    }
    assert stated == {
        "a100": ("bf16", "inductor", "", cudagraphs, Dynamic.STATIC),
        "h100": (
            "fp16",
            "",
            "",
            cudagraphs | {"cubin_cache": True, "nvfuser_fallback": False, "disable_cpp_codegen": True},
            None,
        ),
        "rtx4090": ("", "inductor", "", cudagraphs, Dynamic.STATIC),
        "mi300x": ("", "inductor", "aot_eager", {}, None),
        **dict.fromkeys(("a10", "h200", "b200", "l40s", "ascend910b", "cpu"), ("", "", "", {}, None)),
    }
    assert [key for key, profile in BOOK.published.items() if profile.contradictions] == ["a100", "h100"]


def test_published_flags_are_applied_or_absent_each_with_its_reason() -> None:
    profile = resolved("published", H100, precision="fp16")
    assert outcomes(profile) == {
        "triton.cudagraphs": Outcome.APPLIED,
        "max_autotune": Outcome.APPLIED,
        "cubin_cache": Outcome.ABSENT,
        "nvfuser_fallback": Outcome.ABSENT,
        "disable_cpp_codegen": Outcome.APPLIED,
    }
    assert profile.values["options"] == {
        "triton.cudagraphs": True,
        "max_autotune": True,
        "disable_cpp_codegen": True,
    }
    assert "cubin_cache=True: absent (no such option" in notices(profile)
    assert "forbids triton and max_autotune on H100" in notices(profile)


def test_dynamic_shapes_off_is_an_argument_and_no_option() -> None:
    profile = resolved("published", A100)
    assert profile.values["dynamic"] is Dynamic.STATIC
    assert "dynamic" not in profile.values["options"]
    for said in ({"dynamic": Dynamic.DYNAMIC}, {"dynamic_dims": {"tokens": (1,)}}):
        assert "dynamic" not in resolved("published", A100, **said).values


def test_a_dtype_is_advice_whatever_the_profile_says() -> None:
    profile = resolved("published", H100, precision="bf16")
    flag = next(flag for flag in profile.flags if flag.name == "dtype")
    assert (flag.value, flag.outcome) == ("fp16", Outcome.ADVICE)
    assert "stays bf16" in flag.detail


def test_a_slice_with_few_multiprocessors_is_told_that_products_are_not_tuned() -> None:
    flag = next(flag for flag in resolved("published", SLICE).flags if flag.name == "max_autotune")
    assert flag.outcome is Outcome.APPLIED
    assert flag.detail == "matrix products are not tuned: 42 multiprocessors (MIG slice 3g.20gb), torch asks for 68"
    book = with_options("a100", {"max_autotune_gemm": True})
    assert outcomes(resolved("default", SLICE, book=book))["max_autotune_gemm"] is Outcome.NOT_HERE
    assert outcomes(resolved("default", A100, book=book))["max_autotune_gemm"] is Outcome.APPLIED


@pytest.mark.parametrize(("capability", "tuned"), [((9, 4), True), ((8, 0), False), ((10, 3), False), ((12, 0), True)])
def test_on_rocm_the_architecture_decides(capability: tuple[int, int], tuned: bool) -> None:
    device = dataclasses.replace(MI300X, capability=capability)
    assert bool(device.untuned_products()) is not tuned


def test_a_gpu_s_flags_mean_nothing_on_a_cpu_and_are_left_out() -> None:
    profile = resolved("published/h100", CPU)
    assert outcomes(profile)["triton.cudagraphs"] is Outcome.NOT_HERE
    assert outcomes(profile)["disable_cpp_codegen"] is Outcome.NOT_HERE
    assert profile.values == {"options": {"max_autotune": True}}


def test_ascend_is_eager_until_measured_also_where_the_source_only_names_it() -> None:
    for asked in ("default", "published"):
        profile = resolved(asked, ASCEND)
        assert "eager until it is measured" in profile.eager
        assert profile.values == {}
    assert resolved("none", ASCEND).eager == ""


def test_fp8_is_eager_everywhere() -> None:
    for device in (H100, MI300X, CPU):
        assert "until it is measured" in resolved("default", device, precision="fp8").eager


def test_a_device_without_published_flags_takes_the_default_profile_and_says_so() -> None:
    profile = resolved("published", CPU)
    assert profile.name == "default/cpu"
    assert "published/cpu states no flags" in notices(profile)


def test_an_unknown_device_gets_nothing_and_is_told() -> None:
    profile = resolved("default", Device(kind=Kind.CUDA, name="NVIDIA T4", multiprocessors=40))
    assert profile.values == {}
    assert notices(profile) == "no hardware profile for NVIDIA T4: inductor's own defaults"


def test_a_profile_of_another_device_can_be_taken_and_must_exist() -> None:
    assert resolved("published/rtx4090", H100).name == "published/rtx4090"
    with pytest.raises(UnknownDeviceError, match=r"'h800'; there are: a10, a100, h100"):
        resolved("default/h800", H100)


def test_the_aot_eager_of_the_source_is_told_how_to_be_had() -> None:
    profile = resolved("published", MI300X)
    assert profile.values == {"backend": "inductor"}
    assert "fallbackBackend=aot_eager: not here" in notices(profile)


def test_a_mode_options_or_another_backend_of_the_job_put_the_profile_s_options_aside() -> None:
    for said in ({"mode": "max-autotune"}, {"options": {"shape_padding": True}}, {"backend": "aot_eager"}):
        profile = resolved("published", A100, **said)
        assert "options" not in profile.values
        assert {outcomes(profile)[name] for name in ("triton.cudagraphs", "max_autotune")} == {Outcome.OVERRIDDEN}


def test_what_the_profile_advises_against_is_noticed_also_inside_a_mode() -> None:
    assert "triton.cudagraphs is on, against the advice" in notices(resolved("default", H100, mode="max-autotune"))
    assert resolved("default", H100, mode="default").notices == ()


def test_without_a_profile_nothing_is_touched() -> None:
    assert resolved("none", H100, mode="max-autotune") == ResolvedProfile(name="none")


def with_options(key: str, options: dict[str, Any]) -> Book:
    return Book.from_document(merged(BOOK.to_document(), {"default": {key: {"options": options}}}))


@pytest.mark.parametrize(
    ("name", "value", "outcome", "detail"),
    [
        ("max-autotune", True, Outcome.APPLIED, ""),
        ("cudagraphs", True, Outcome.RENAMED, "now triton.cudagraphs"),
        ("max_recompiles", 4, Outcome.RENAMED, "spec.compile.recompileLimit"),
        ("dynamic_shapes", False, Outcome.RENAMED, "spec.compile.dynamic"),
        ("no_such_thing", True, Outcome.ABSENT, "torch 2.15.0 has no such option"),
        ("max_autotune", 1, Outcome.ABSENT, "torch wants bool"),
        ("compile_threads", 4, Outcome.APPLIED, ""),
        ("use_fast_math", True, Outcome.APPLIED, "changes the numbers"),
    ],
)
def test_an_option_of_a_platform_is_judged_by_the_installed_torch(
    name: str, value: Any, outcome: Outcome, detail: str
) -> None:
    flag = resolved("default", H100, book=with_options("h100", {name: value})).flags[-1]
    assert (flag.name, flag.outcome) == (name, outcome)
    assert detail in flag.detail


def test_a_renamed_option_is_passed_under_its_new_name() -> None:
    book = with_options("h100", {"cudagraphs": True, "max-autotune": True, "max_recompiles": 4})
    assert resolved("default", H100, book=book).values["options"] == {
        "triton.cudagraphs": True,
        "max_autotune": True,
    }


def test_a_mode_or_backend_that_torch_lacks_is_absent() -> None:
    book = Book.from_document(merged(BOOK.to_document(), {"default": {"h100": {"mode": "fast", "backend": "nvfuser"}}}))
    profile = resolved("default", H100, book=book)
    assert outcomes(profile) == {"backend": Outcome.ABSENT, "mode": Outcome.ABSENT}
    assert profile.values == {}


def platform(tmp_path: Path, text: str) -> Book:
    file = tmp_path / "profiles.yaml"
    file.write_text(text)
    return read_book({ENV_PROFILES_FILE: str(file)})


def test_a_platform_s_file_changes_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    book = platform(
        tmp_path,
        "devices: {l4: {title: NVIDIA L4, kind: cuda, match: '\\bL4\\b'}}\n"
        "default:\n"
        "  l4: {dtype: bf16, backend: inductor, why: ours}\n"
        "  a100: {options: {shape_padding: true}, avoid: {triton.cudagraphs: null}}\n"
        "eagerPrecisions: {fp8: null}\n",
    )
    assert book.entry(Kind.CUDA, "NVIDIA L4") == "l4"
    assert book.default["a100"].options == {"shape_padding": True}
    assert list(book.default["a100"].avoid) == ["max_autotune"]
    assert book.default["a100"].evidence == BOOK.default["a100"].evidence
    assert book.eager_precisions == {}
    assert book.published == BOOK.published


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("default: {h100: {optoins: {}}}", "default.h100.optoins is {}; extra inputs are not permitted"),
        ("default: {h100: {options: {max_autotune: []}}}", "default.h100.options.max_autotune is []; "),
        ("default: {l4: {why: ours}}", "default.l4: must be one of devices (a10, "),
        ("default: {h100: {dynamic: static}}", 'default.h100.dynamic is "static"; input should be'),
        ("default: {h100: {mode: lite, options: {a: true}}}", "default.h100 is "),
        ("devices: {h100: {match: '('}}", 'devices.h100.match is "("; must be a regular expression'),
        ("[]", "is []; must be a map with devices, default or published"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_a_mistake_in_a_platform_s_file_is_named_with_file_path_value_and_rule(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ProfileFileError) as caught:
        platform(tmp_path, text)
    assert str(tmp_path / "profiles.yaml") in str(caught.value)
    assert problem in str(caught.value)


def test_every_mistake_of_a_platform_s_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ProfileFileError) as caught:
        platform(tmp_path, "default: {h100: {bakend: x}, cpu: {dynamic: x}}\npublihsed: {}\n")
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_is_not_there_is_named_with_its_variable(tmp_path: Path) -> None:
    with pytest.raises(ProfileFileError, match=f"cannot be read.*correct {ENV_PROFILES_FILE}"):
        read_book({ENV_PROFILES_FILE: str(tmp_path / "nowhere.yaml")})
