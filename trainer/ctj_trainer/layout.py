"""How does the model come to lie on the ranks? Hooks excluded, compiled in place, laid out, and checked."""

import logging

from torch import nn

from ctj_api.spec import Strategy
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.hooks.frozen import FrozenHooks
from ctj_trainer.recipe import Recipe, blocks_of
from ctj_trainer.scene import Scene
from ctj_trainer.strategies import prepare
from ctj_trainer.strategies.prepared import Prepared

log = logging.getLogger("ctj")


def lay_out(scene: Scene, recipe: Recipe, policy: CompilePolicy | None, lengths: Lengths | None) -> Prepared:
    """Build the recipe's model and lay it out; `policy` None: nothing is compiled. Collective."""
    attempt = scene.attempt

    def compile_in_place(model: nn.Module, strategy: Strategy) -> None:
        from ctj_trainer.checks.at_start import exclude_hooks
        from ctj_trainer.checks.switches import whole_activation_budget
        from ctj_trainer.compile.regions import place

        assert policy is not None
        for text in (*exclude_hooks(model), *whole_activation_budget(model)):
            scene.notice(text)
        blocks = blocks_of(model, recipe)
        placement = place(model, blocks, policy=policy, strategy=strategy, lengths=lengths)
        log.info("%s", placement)
        for text in placement.notices:
            scene.notice(text)

    return prepare(
        attempt.stage.strategy,
        recipe,
        training=attempt.training,
        micro_batch_size=attempt.micro_batch_size,
        device=scene.ranks.device,
        offload=attempt.stage.offload,
        place=compile_in_place if policy is not None else None,
    )


def check(scene: Scene, recipe: Recipe, prepared: Prepared) -> FrozenHooks:
    """Tell what would break compiled code here, and freeze the hooks it will be compiled with. Collective."""
    from ctj_trainer.checks.at_start import first_shapes, problems_at_start

    attempt, ranks = scene.attempt, scene.ranks
    shapes = first_shapes(recipe, attempt.training, ranks=ranks, micro_batch_size=attempt.micro_batch_size)
    for text in problems_at_start(prepared.inner, attempt.stage.strategy, shapes=shapes):
        scene.notice(text)
    return FrozenHooks.of(prepared.inner)
