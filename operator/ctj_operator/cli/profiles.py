"""`ctj profiles`: the hardware profiles, and what this machine resolves to. A process of the trainer is asked."""

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ctj_operator.cli import words
from ctj_operator.cli.trainer import ask_trainer


def ask(*, profile: str, device: str) -> dict[str, Any]:
    """Return the trainer's answer.

    Raises:
        Refusal: the device or the platform's file is wrong, or there is no trainer here.
    """
    arguments = ["--profile", profile, *(("--device", device) if device else ())]
    return ask_trainer("ctj_trainer.hardware", arguments)


def show(answer: dict[str, Any], console: Console) -> None:
    """Print the table, then what is here and what becomes of every flag."""
    console.print(_table(answer["profiles"].items()))
    for line in (*_machine(answer), *_resolved(answer)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(profiles: Iterable[tuple[str, dict[str, Any]]]) -> Table:
    table = Table("device", "dtype", "backend", "sets", "avoid", "why, and evidence", show_lines=True)
    for key, entry in profiles:
        evidence = [f"{address}: {finding}" for address, finding in entry.get("evidence", {}).items()]
        table.add_row(
            f"{key}\n{entry['title']}",
            entry.get("dtype") or "-",
            "eager" if entry.get("eager") else entry.get("backend") or "-",
            "\n".join(_sets(entry)) or "nothing",
            "\n".join(f"{flag}: {why}" for flag, why in entry.get("avoid", {}).items()) or "-",
            "\n".join(
                [
                    *filter(None, [entry.get("eager"), entry.get("why")]),
                    *entry.get("contradictions", []),
                    *(evidence or ["evidence: none found"]),
                    entry.get("measured", "not measured"),
                ]
            ),
        )
    return table


def _sets(entry: dict[str, Any]) -> list[str]:
    said = [f"{name}={json.dumps(value)}" for name, value in entry.get("options", {}).items()]
    named = [f"{name}={entry[name]}" for name in ("mode", "dynamic", "fallbackBackend") if entry.get(name)]
    return said + named


def _machine(answer: dict[str, Any]) -> list[str]:
    machine = answer["machine"]
    processor = machine["processor"]
    lines = [
        "This machine:",
        f"  CPU: {processor['model']}, {words.plural(processor['cores'], 'core')}"
        + (f", {processor['instructions']}" if processor["instructions"] else ""),
    ]
    lines += [f"  {_device(device)}" for device in machine["devices"] if device["kind"] != "cpu"]
    lines += [f"  MIG slices of GPU {gpu}: {', '.join(names)}" for gpu, names in machine["slices"].items()]
    if len(machine["devices"]) > 1:
        lines.append(f"  interconnect: {machine['interconnect']}")
    return lines + [f"  {note}" for note in machine["notes"]]


def _device(device: dict[str, Any]) -> str:
    facts = [device["name"]]
    if device["memory_bytes"]:
        facts.append(words.size(device["memory_bytes"]))
    if device["multiprocessors"]:
        facts.append(f"{device['multiprocessors']} multiprocessors")
    return ", ".join(facts)


def _resolved(answer: dict[str, Any]) -> list[str]:
    resolved = answer["resolved"]
    where = "here" if answer["device"]["here"] else "on a device that was not asked"
    lines = [f"Profile {resolved['name']} with torch {answer['torch']}, {where}:"]
    if resolved["eager"]:
        return [*lines, f"  runs eager: {resolved['eager']}"]
    values = [f"{name}={json.dumps(value)}" for name, value in resolved["values"].items()]
    lines.append(f"  sets: {', '.join(values) or 'nothing'}")
    rows = [
        (f"  {flag['name']}", f"{json.dumps(flag['value'])}", flag["outcome"], flag["detail"])
        for flag in resolved["flags"]
    ]
    lines += words.aligned(rows) if rows else []
    told = {flag["name"] for flag in resolved["flags"]}
    return lines + [f"  {text}" for text in resolved["notices"] if not any(f": {name}=" in text for name in told)]
