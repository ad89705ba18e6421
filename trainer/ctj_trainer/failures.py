"""Which exit code does an exception mean? One table; what no row knows was raised by the user's recipe."""

import errno

import torch
from torch import distributed as dist

from ctj_api.exit_codes import ExitCode
from ctj_trainer.batches import BatchError
from ctj_trainer.checkpoint import FencedError, MismatchError, MissingRanksError, StorageError
from ctj_trainer.compile.errors import LateRankError, RanksDifferError
from ctj_trainer.compile.policy import CompileConfigError
from ctj_trainer.compile.session import NoFallbackError
from ctj_trainer.loop import NonFiniteError
from ctj_trainer.messages import MessageError
from ctj_trainer.recipe import DataError, RecipeError
from ctj_trainer.strategies.foundation import PrecisionUnavailableError
from ctj_trainer.strategies.zero3 import StrategyUnavailableError


class CompiledCodeError(RuntimeError):
    """Compiled code raised past the guard. Peers may wait in a collective, so only a new attempt can go on, eager."""


_BY_CLASS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (RecipeError, ExitCode.CONFIGURATION),
    (BatchError, ExitCode.CONFIGURATION),
    (CompileConfigError, ExitCode.CONFIGURATION),
    (RanksDifferError, ExitCode.CONFIGURATION),
    (StrategyUnavailableError, ExitCode.CONFIGURATION),
    (PrecisionUnavailableError, ExitCode.CONFIGURATION),
    (MismatchError, ExitCode.CONFIGURATION),
    (DataError, ExitCode.DATA_OR_STORAGE),
    (StorageError, ExitCode.DATA_OR_STORAGE),
    (NonFiniteError, ExitCode.NON_FINITE),
    (NoFallbackError, ExitCode.COMPILE),
    (MessageError, ExitCode.CONFIGURATION),
    (LateRankError, ExitCode.PEER_LOST),
    (FencedError, ExitCode.PEER_LOST),
    (CompiledCodeError, ExitCode.PEER_LOST),  # its effect: the peers are lost to us; another attempt is right
    (MissingRanksError, ExitCode.PEER_LOST),
    (torch.OutOfMemoryError, ExitCode.OUT_OF_MEMORY),
    (MemoryError, ExitCode.OUT_OF_MEMORY),
    (dist.DistNetworkError, ExitCode.PEER_LOST),
    (dist.DistStoreError, ExitCode.PEER_LOST),
    (dist.DistBackendError, ExitCode.PEER_LOST),
)
# gloo raises bare RuntimeErrors; so does the CPU allocator.
_BY_TEXT = (
    ("Connection closed by peer", ExitCode.PEER_LOST),
    ("Connection reset by peer", ExitCode.PEER_LOST),
    ("Broken pipe", ExitCode.PEER_LOST),
    ("Timed out waiting", ExitCode.PEER_LOST),
    ("Application timeout caused pair closure", ExitCode.PEER_LOST),
    ("can't allocate memory", ExitCode.OUT_OF_MEMORY),
)
_STORAGE_ERRNO = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT, errno.ESTALE}


def kind_of(error: BaseException) -> ExitCode:
    """Return the exit code of a rank that ends with `error`."""
    for known, kind in _BY_CLASS:
        if isinstance(error, known):
            return kind
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNO:
        return ExitCode.DATA_OR_STORAGE
    if isinstance(error, RuntimeError):
        for text, kind in _BY_TEXT:
            if text in str(error):
                return kind
    return ExitCode.USER_CODE
