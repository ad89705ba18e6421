"""The hardware profile as one more source of a policy: below whatever a person said, above torch's own defaults."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ctj_api.spec import CompileScope
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy
from ctj_trainer.compile.sources import Layer, resolve
from ctj_trainer.hardware.book import ProfileFileError, UnknownDeviceError, read_book
from ctj_trainer.hardware.detect import this_device
from ctj_trainer.hardware.resolve import ResolvedProfile
from ctj_trainer.hardware.resolve import resolve as resolve_profile
from ctj_trainer.hardware.torch_facts import read_torch_facts

if TYPE_CHECKING:
    import torch


def resolve_with_profile(
    *layers: Layer, profile: str, device: "torch.device", precision: str, environment: Mapping[str, str]
) -> tuple[CompilePolicy, ResolvedProfile | None]:
    """Put layers and the device's profile to one policy; no profile is read where nothing is compiled anyway.

    A device whose profile says eager runs eager, whatever else was said; `profile: none` is the way around it.

    Raises:
        CompileConfigError: a layer's problems, an unknown device, or a platform's profile file that cannot be used.
    """
    said = resolve(*layers, switches=environment)
    if not said.compiles:
        return said, None
    found = _found(profile, said, device, precision, environment)
    where = f"hardware profile {found.name}"
    if found.eager:
        policy = said.replaced(where=where, notice=f"{where}: {found.eager}", scope=CompileScope.DISABLED)
    else:
        policy = resolve(*layers, Layer.of(found.values, where=where), switches=environment)
    return replace(policy, notices=(*policy.notices, *found.notices)), found


def _found(
    profile: str, said: CompilePolicy, device: "torch.device", precision: str, environment: Mapping[str, str]
) -> ResolvedProfile:
    try:
        return resolve_profile(
            profile,
            book=read_book(environment),
            device=this_device(device),
            facts=read_torch_facts(),
            said={name: getattr(said, name) for name in said.origins},
            precision=precision,
        )
    except UnknownDeviceError as error:
        raise CompileConfigError([f"spec.compile.profile is {profile!r}: {error}"]) from error
    except ProfileFileError as error:
        raise CompileConfigError(str(error).splitlines()) from error
