"""`ctj profiles` as a person sees it; a stand-in answers for the trainer."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.workplace import Workplace

ANSWER: dict[str, Any] = {
    "torch": "2.15.0",
    "profiles": {
        "h100": {
            "title": "NVIDIA H100",
            "dtype": "fp16",
            "options": {"max_autotune": True},
            "why": "stated",
            "measured": "not measured",
        }
    },
    "machine": {
        "devices": [{"kind": "cuda", "name": "NVIDIA H100", "memory_bytes": 80 * 2**30, "multiprocessors": 132}] * 2,
        "processor": {"model": "Xeon", "instructions": "AMX", "cores": 8},
        "interconnect": "every pair over NVLink (NV18); peer-to-peer on",
        "slices": {},
        "notes": [],
    },
    "device": {"name": "NVIDIA H100", "here": True},
    "resolved": {
        "name": "published/h100",
        "eager": "",
        "values": {"backend": "inductor", "options": {"max_autotune": True}},
        "flags": [
            {"name": "cubin_cache", "value": True, "outcome": "absent", "detail": "no such option"},
        ],
        "notices": ["the source contradicts itself"],
    },
}


def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    trainer = tmp_path / "trainer-python"
    trainer.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    trainer.chmod(0o755)
    monkeypatch.setenv("CTJ_TRAINER_PYTHON", str(trainer))


def test_the_table_and_this_machine_are_shown(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(tmp_path, monkeypatch, f"print(json.dumps({ANSWER!r}))")
    monkeypatch.setenv("COLUMNS", "200")
    out = place.ctj("profiles").out
    for said in (
        "max_autotune=true",
        "evidence: none found",
        "not measured",
        "NVIDIA H100, 80.0 GiB, 132 multiprocessors",
        "interconnect: every pair over NVLink (NV18); peer-to-peer on",
        "Profile published/h100 with torch 2.15.0, here:",
        'sets: backend="inductor", options={"max_autotune": true}',
        "cubin_cache  true  absent  no such option",
        "the source contradicts itself",
    ):
        assert said in out


def test_json_is_what_the_trainer_said(place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(tmp_path, monkeypatch, f"print(json.dumps({ANSWER!r} | {{'arguments': sys.argv[1:]}}))")
    said = json.loads(place.ctj("profiles", "--json", "--device", "h100", "--profile", "published").out)
    assert said["arguments"][2:] == ["--profile", "published", "--device", "h100"]
    assert said["resolved"] == ANSWER["resolved"]


def test_a_wrong_device_or_file_is_bad_usage_in_the_trainer_s_words(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(tmp_path, monkeypatch, "sys.exit(print('no hardware profile for device', file=sys.stderr) or 2)")
    ended = place.ctj("profiles", "--device", "h800")
    assert ended.code == 2
    assert "no hardware profile for device" in ended.err


def test_without_a_trainer_the_way_to_get_one_is_told(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(tmp_path, monkeypatch, "sys.exit('No module named ctj_trainer')")
    ended = place.ctj("profiles")
    assert ended.code == 4
    assert "pip install 'ctj[trainer]'" in ended.err
    assert "No module named ctj_trainer" in ended.err
