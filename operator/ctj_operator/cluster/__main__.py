"""`python -m ctj_operator.cluster`: one operator process."""

import logging
import sys

import prometheus_client

import ctj_api
from ctj_api import names
from ctj_api.exit_codes import RunExit
from ctj_operator.cluster.api_errors import NotFound
from ctj_operator.cluster.client import CannotLogIn
from ctj_operator.cluster.operator import CannotStart, Operator
from ctj_operator.cluster.settings import describe, parse_settings

logger = logging.getLogger(__name__)


def main() -> int:
    """Run; the exit code is 0 after SIGTERM, 1 when leadership was lost, and 4 where there is nothing to work with."""
    settings = parse_settings(sys.argv[1:])
    # Else every counter and histogram has one more series that nobody reads. The one untyped function there.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logger.info("ctj operator %s %s", ctj_api.__version__, describe(settings))
    try:
        return Operator(settings).run()
    except (CannotLogIn, CannotStart) as problem:
        logger.error("%s", problem)
    except NotFound:
        logger.error("the API server has no %s: kubectl apply -f crds/%s.yaml", names.KIND, names.PLURAL)
    except OSError as problem:
        logger.error("cannot serve on --metrics-port %s: %s", settings.metrics_port, problem)
    return RunExit.ENVIRONMENT


if __name__ == "__main__":
    sys.exit(main())
