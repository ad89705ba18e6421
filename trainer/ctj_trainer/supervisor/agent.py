"""torchrun's agent, with a record of how its workers ended: its own exit code is 1 whatever happened to them."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from ctj_api import names
from ctj_trainer.supervisor.processes import die_with_parent, parent_from_environment


def main(arguments: list[str]) -> int:
    """Run the agent with torchrun's own arguments."""
    die_with_parent(parent_from_environment())
    os.environ[names.ENV_PARENT] = str(os.getpid())  # for the workers
    from torch.distributed import DistNetworkError, DistStoreError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exitCode": failure.exitcode, "at": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        _record({"failures": failures})
        return max(error.get_first_failure()[1].exitcode, 1)  # tells the kind where the record cannot be written
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        _record({"rendezvous": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _record(document: dict[str, object]) -> None:
    path = Path(os.environ[names.ENV_AGENT_RECORD])
    draft = path.with_suffix(".tmp")
    with suppress(OSError):  # a full disk
        draft.write_text(json.dumps(document))
        draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
