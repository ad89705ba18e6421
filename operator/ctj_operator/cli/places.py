"""Where local things are: the folder of a named job, the compile cache."""

import os
import shlex
from pathlib import Path

from ctj_operator.cli import DEFAULT_WORK_DIR
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.store import JOB_FILE, Store


def cache_dir() -> Path:
    """Return the compile cache all jobs of this user share."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ctj" / "compile"


def stored_jobs(work_dir: Path) -> list[Store]:
    """Return every job below `work_dir`, by name; folders that `--fresh` moved aside are not jobs."""
    folders = sorted(path.parent for path in work_dir.glob(f"*/{JOB_FILE}"))
    return [store for store in map(Store, folders) if not _is_aside(store)]


def _is_aside(store: Store) -> bool:
    """Jobs lie in folders of their own name, and a name has no dot; a file that cannot be read tells nothing."""
    try:
        return store.folder.name != store.read_job().identity.name
    except Refusal:
        return "." in store.folder.name


def find_job(name: str, work_dir: Path) -> Store:
    """Return the job called `name`, or the one in the folder `name`.

    Raises:
        Refusal: there is no such job; names those there are.
    """
    for folder in (work_dir / name, Path(name)):
        if (folder / JOB_FILE).exists():
            return Store(folder)
    there = ", ".join(store.folder.name for store in stored_jobs(work_dir)) or "none"
    raise Refusal(
        f"no job {name!r} in {work_dir}; jobs there: {there}. "
        "Start one with `ctj run FILE`, or name another folder with --work-dir"
    )


def typed_name(store: Store) -> str:
    """Return what names this job on a command line typed here: its name, or its folder if that is elsewhere."""
    name = store.folder.name
    here = (DEFAULT_WORK_DIR / name).resolve() == store.folder.resolve()
    return name if here else shlex.quote(str(store.folder))


def going_on(store: Store) -> str:
    """Return the command that goes on with this job, ready to be typed."""
    return shlex.join(["ctj", "run", str(store.folder)])
