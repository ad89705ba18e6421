"""How does this attempt compile? Settled once, before anything is built, and equal on every rank."""

import json
import logging
import os

from ctj_api.attempt import Mode
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.compile.sources import Layer
from ctj_trainer.scene import Scene

log = logging.getLogger("ctj")
POLICY_FILE = "compile-policy.json"


def settle(scene: Scene) -> CompilePolicy:
    """Put together how this attempt compiles, before anything is built; say it once, and store it.

    Raises:
        CompileConfigError: the installed torch cannot do it.
    """
    from ctj_trainer.compile.sources import environment_layer, resolve, spec_layer

    attempt = scene.attempt
    layers = (spec_layer(attempt.compile), environment_layer(os.environ))
    policy = _profiled(scene, *layers) if attempt.mode is Mode.COMPILED else resolve(*layers, switches=os.environ)
    for text in policy.notices:
        scene.notice(text)
    if scene.ranks.rank == 0:
        log.info("%s", "\n".join(policy.lines()))
        (scene.folder / POLICY_FILE).write_text(json.dumps(policy.to_document(), indent=2) + "\n")
    return policy


def _profiled(scene: Scene, *layers: Layer) -> CompilePolicy:
    """Let the hardware profile fill in what nobody said."""
    from ctj_trainer.compile.installed import check_installed
    from ctj_trainer.compile.profile import resolve_with_profile

    attempt = scene.attempt
    policy, profile = resolve_with_profile(
        *layers,
        profile=attempt.compile.profile,
        device=scene.ranks.device,
        precision=attempt.training.precision.value,
        environment=os.environ,
    )
    if policy.compiles:
        check_installed(policy)
    if profile is not None:
        log.info("%s", profile)
    return policy


def compare_ranks(scene: Scene, policy: CompilePolicy) -> None:
    """Refuse to compile on ranks that are not equal, before anything is built. Collective.

    Raises:
        RanksDifferError: what differs, on which rank.
    """
    if policy.compiles and scene.attempt.mode is Mode.COMPILED:
        from ctj_trainer.compile.fingerprint import fingerprint, refuse_differences

        refuse_differences(scene.ranks.gather(fingerprint(policy, scene.ranks.device.type)))
