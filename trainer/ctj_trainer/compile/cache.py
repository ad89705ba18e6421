"""What this process does about its compile cache: choose the folder, mend it when it breaks, publish what is in it.

A broken cache costs a compilation, never an attempt: it is wiped once, and if that does not help it is switched off.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ctj_api.attempt import CacheArchive
from ctj_trainer.compile import archive as archives
from ctj_trainer.compile.cache_folder import (
    ENV_FOLDER,
    cache_key,
    holds_collectives,
    rank_folder,
    throw_away_folder,
    wipe,
)
from ctj_trainer.compile.causes import one_line
from ctj_trainer.compile.guard import CompileGuard
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.ranks import Ranks

# What the loader of libraries, the file system and torch say when what lies in the cache, or its place, is no good.
_SIGNS = (
    "file too short",
    "invalid ELF header",
    "cannot open shared object",
    "undefined symbol",
    "No space left on device",
    "Read-only file system",
    "Stale file handle",
    "Disk quota exceeded",
)


class CompileCache:
    """The folder of this rank. `base`: that of the node, or of the volume that several nodes share."""

    def __init__(self, policy: CompilePolicy, *, rank: int) -> None:
        found = os.environ.get(ENV_FOLDER)
        self._base = Path(found) if found else None
        self._rank = rank
        if self._base is not None and holds_collectives(policy.options):
            os.environ[ENV_FOLDER] = str(rank_folder(self._base, rank))

    def mended(
        self, run: Callable[[], None], *, guard: CompileGuard, ranks: Ranks, notice: Callable[[str], None]
    ) -> None:
        """Run the first compilations; where the cache made one fail, run them again without what was in it. Collective.

        `run` ends when all ranks have ended theirs; it may be called three times, on every rank as often.
        """
        records = _Records()
        run()
        for remedy, cure in (("wiped", self._wipe), ("switched off for this attempt", self._switch_off)):
            mine = cache_trouble(records.new())
            troubles = ranks.gather(mine)
            first = next((rank for rank, text in enumerate(troubles) if text), None)
            if first is None:
                return
            notice(f"the compile cache is broken on rank {first} ({troubles[first]}): {remedy}, and compiled again")
            if mine:
                cure()
                guard.start_over()
            run()

    def publish(self, root: Path, *, before: CacheArchive | None, compiled: bool) -> CacheArchive | None:
        """Leave what is in the folder for the next attempt, wherever it runs. For rank 0, after the warm-up.

        `before`: what this attempt was given; it stays good where nothing new was compiled.

        Raises:
            OSError: the root cannot be written.
        """
        if self._base is None or not self._base.is_dir():
            return None
        if before is not None and before.key == cache_key() and not compiled:
            return before
        made = archives.publish(self._base, root, key=cache_key())
        if made is not None:
            archives.forget_others(root, made)
        return made

    def _wipe(self) -> None:
        folder = os.environ.get(ENV_FOLDER)
        if folder:
            wipe(Path(folder))
        _forget_paths()

    def _switch_off(self) -> None:
        os.environ[ENV_FOLDER] = str(throw_away_folder())
        torch.compiler.config.force_disable_caches = True
        _forget_paths()


def cache_trouble(records: Iterable[Any]) -> str:
    """Return the first failed compilation that the cache is to blame for, in one line; empty if there is none."""
    folder = os.environ.get(ENV_FOLDER, "")
    for record in records:
        reason = record.fail_reason or ""
        is_io = folder and folder in reason and any(sign in reason for sign in ("Error: [Errno", "No such file"))
        if record.fail_type and (is_io or any(sign in reason for sign in _SIGNS)):
            return one_line(f"{record.fail_type}: {reason}")[:200]
    return ""


class _Records:
    """torch's records of compilations that are newer than the last question."""

    def __init__(self) -> None:
        from torch._dynamo.utils import get_compilation_metrics

        self._read = get_compilation_metrics
        self._known = list(self._read())

    def new(self) -> list[Any]:
        known = {id(record) for record in self._known}  # held, so that no id is used again
        found = [record for record in self._read() if id(record) not in known]
        self._known = list(self._read())
        return found


def _forget_paths() -> None:
    """Inductor remembers files it has written and libraries it has loaded; they may be gone."""
    from torch._inductor.utils import clear_caches

    clear_caches()
