"""Will each stage of the ladder fit? The first attempt asks, before anything is allocated, for the whole ladder."""

import torch

from ctj_api.attempt import Attempt
from ctj_api.report import MemoryPrediction
from ctj_trainer.memory import memory_use
from ctj_trainer.memory_prediction import Workload, predict_memory
from ctj_trainer.recipe import Recipe, blocks_of


def predict(attempt: Attempt, recipe: Recipe, *, device: torch.device) -> list[MemoryPrediction]:
    """Predict the peak of one process of every stage.

    Raises:
        CannotPredict: the model does not run on fake tensors.
    """
    with torch.device("meta"):
        model = recipe.build_model()
    workload = Workload(
        loss=recipe.loss,
        sample=recipe.samples[0],
        blocks=blocks_of(model, recipe),
        micro_batch_size=attempt.micro_batch_size,
        device=device,
    )
    return predict_memory(
        model,
        workload,
        ladder=attempt.ladder,
        training=attempt.training,
        baseline_bytes=0 if device.type == "cuda" else memory_use().used,
    )
