"""`ctj logs`: what the trainers of a local job printed."""

import os
from collections.abc import Iterator
from typing import BinaryIO

from ctj_operator.cli import words
from ctj_operator.local.files import read_json
from ctj_operator.local.node import NodeFolder, node_folder
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.store import Store


def lines(store: Store, *, attempt: int | None, rank: int | None) -> Iterator[str]:
    """Yield the newest attempt's (or `attempt`'s) output, all of it or one rank's.

    Raises:
        Refusal: there is none.
    """
    children = {
        record["attempt"]: record for path in store.children.glob("*/child.json") if (record := read_json(path))
    }
    if not children:
        raise Refusal(
            f"{store.folder.name} has not started any trainer yet; `ctj explain {store.folder.name}` says why"
        )
    number = max(children) if attempt is None else attempt
    if number not in children:
        raise Refusal(f"attempt {number} is not here; attempts: {', '.join(str(known) for known in sorted(children))}")
    record = children[number]
    for index in range(record["nodes"]):
        node = node_folder(store.children, record["name"], index)
        if rank is None:
            yield f"==> {record['name']} node {index}"
            yield from _text(node)
        else:
            prefix = f"[rank {rank}] "
            yield from (line.removeprefix(prefix) for line in _text(node) if line.startswith(prefix))


def _text(node: NodeFolder) -> Iterator[str]:
    """Yield the lines; the supervisor drops the middle of a long log, which leaves a hole."""
    if not node.log.exists():
        return
    with node.log.open("rb") as file:
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            start = _seek(file, at, os.SEEK_DATA, otherwise=size)
            if start > at:
                yield f"... {words.size(start - at)} of output were dropped here ..."
            at = _seek(file, start, os.SEEK_HOLE, otherwise=size)
            file.seek(start)
            while file.tell() < at and (line := file.readline(at - file.tell())):
                yield line.decode(errors="replace").rstrip("\r\n").replace("\0", "")


def _seek(file: BinaryIO, at: int, what: int, *, otherwise: int) -> int:
    try:
        return os.lseek(file.fileno(), at, what)
    except OSError:  # nothing of it follows, or this file system knows no holes
        return otherwise
