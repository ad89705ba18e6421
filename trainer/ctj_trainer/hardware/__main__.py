"""`python -m ctj_trainer.hardware`: the profiles and what this machine resolves to, as one JSON object for `ctj`.

Exit codes: 0; 2 with one line on stderr for an unknown device or a profile file that cannot be used.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from ctj_trainer.hardware.book import Book, ProfileFileError, UnknownDeviceError, read_book
from ctj_trainer.hardware.detect import Machine, detect
from ctj_trainer.hardware.device import Device
from ctj_trainer.hardware.resolve import ResolvedProfile, resolve
from ctj_trainer.hardware.torch_facts import TorchFacts, read_torch_facts


def main() -> int:
    """Print the document."""
    parser = argparse.ArgumentParser(prog="python -m ctj_trainer.hardware", description=__doc__)
    parser.add_argument("--profile", choices=["default", "published"], default="default")
    parser.add_argument("--device", default="", help="a device of the table instead of what is here")
    asked = parser.parse_args()
    try:
        book = read_book()
        if asked.device:
            book.require(asked.device)
    except (ProfileFileError, UnknownDeviceError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report(book, detect(), read_torch_facts(), profile=asked.profile, wanted=asked.device)))
    return 0


def report(book: Book, machine: Machine, facts: TorchFacts, *, profile: str, wanted: str) -> dict[str, Any]:
    """Return everything `ctj profiles` shows. `wanted`: resolve for this entry instead of for what is here."""
    device, asked = machine.devices[0], profile
    if wanted:
        entry = book.require(wanted)
        # Known by its entry only: what would have to be asked of the device itself stays open.
        device, asked = Device(kind=entry.kind, name=entry.title), f"{profile}/{wanted}"
    resolved = resolve(asked, book=book, device=device, facts=facts, said={}, precision="")
    return {
        "torch": facts.version,
        "profiles": {key: {"title": entry.title} | _shown(book, profile, key) for key, entry in book.devices.items()},
        "machine": _machine(machine),
        "device": {"name": device.name, "here": not wanted},
        "resolved": _resolved(resolved),
    }


def _shown(book: Book, set_name: str, key: str) -> dict[str, Any]:
    profile = book.profile(set_name, key)
    return profile.to_document() if profile else {}


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "devices": [asdict(device) | {"slice": device.slice} for device in machine.devices],
        "processor": asdict(machine.processor),
        "interconnect": machine.topology.describe() if len(machine.devices) > 1 else "one device",
        "slices": {str(gpu): list(names) for gpu, names in machine.slices.items()},
        "notes": list(machine.notes),
    }


def _resolved(resolved: ResolvedProfile) -> dict[str, Any]:
    return {
        "name": resolved.name,
        "eager": resolved.eager,
        "values": dict(resolved.values),
        "flags": [asdict(flag) for flag in resolved.flags],
        "notices": list(resolved.notices),
    }


if __name__ == "__main__":
    sys.exit(main())
