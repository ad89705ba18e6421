"""`python -m ctj_operator.cluster`: one operator process."""

import logging
import sys

import ctj_api
from ctj_operator.cluster.operator import Operator
from ctj_operator.cluster.settings import describe, parse_settings


def main() -> int:
    """Run; the exit code is 0 after SIGTERM and 1 when leadership was lost."""
    settings = parse_settings(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger(__name__).info("ctj operator %s %s", ctj_api.__version__, describe(settings))
    return Operator(settings).run()


if __name__ == "__main__":
    sys.exit(main())
