"""What can go wrong with a checkpoint, for whoever must act."""


class StorageError(RuntimeError):
    """The checkpoint folder cannot be read or written; older checkpoints are intact."""


class NoCheckpointError(StorageError):
    """No complete checkpoint is as new as this attempt needs."""


class FencedError(RuntimeError):
    """A newer attempt of the job has started: this one must not write any more."""


class MissingRanksError(RuntimeError):
    """Some ranks did not come to a collective step in time."""


class MismatchError(ValueError):
    """The checkpoint is complete but describes another model."""
