"""Behaves as `ctj_trainer.supervisor` towards the runner, without torch.

Steps, checkpoints, control, report, exit code; what it does is told by `spec.recipe.config`: {stepSeconds, worker,
fillDiskAt, fail: {stage, step, attempts, code}, worse: {stage: {measurement: value}}}.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ATTEMPT = json.loads(os.environ["CTJ_ATTEMPT"])
ROOT, RUN = Path(os.environ["CTJ_CHECKPOINT_ROOT"]), Path(os.environ["CTJ_RUN_DIR"])
FIRST = os.environ["CTJ_NODE_RANK"] == "0"  # one node writes what all nodes share
OWN = ROOT / f"attempt-{ATTEMPT['attempt']:05d}"
CONFIG = ATTEMPT["recipe"]["config"]
STAGE = ATTEMPT["stage"]["name"]
terminated = False


def replace(path: Path, document: dict) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document))
    draft.replace(path)


def loss_after(step: int) -> float:
    return 5.0 / (1 + 0.01 * step)


def newest_checkpoint() -> tuple[int, int] | None:
    entries = [*ATTEMPT.get("lineage", []), {"attempt": ATTEMPT["attempt"], "maxStep": 10**9}]
    found = [
        (int(manifest.parent.name.removeprefix("step-")), entry["attempt"])
        for entry in entries
        for manifest in (ROOT / f"attempt-{entry['attempt']:05d}").glob("step-*/manifest.json")
        if int(manifest.parent.name.removeprefix("step-")) <= entry["maxStep"]
    ]
    return max(found, default=None)


def save(step: int) -> None:
    if not FIRST:
        return
    folder = OWN / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "manifest.json", {"step": step})


def progress(step: int, phase: str) -> None:
    document = {
        "attempt": ATTEMPT["attempt"],
        "step": step,
        "phase": phase,
        "mode": ATTEMPT["mode"],
        "loss": loss_after(step),
        "gradNorm": 1.0,
        "stepSeconds": CONFIG["stepSeconds"],
        "graphs": 4,
        "compileSeconds": 1.5,
        "memoryUsedBytes": 640 * 1024**2,
        "updatedAt": time.time(),
    }
    replace(RUN / "progress.json", document)


def control() -> dict:
    try:
        return json.loads(Path(os.environ["CTJ_CONTROL_FILE"]).read_text())
    except (FileNotFoundError, ValueError):
        return {"stop": "None", "compile": "Auto"}


def end(code: int, step: int, checkpoint: int | None, failure: dict | None = None) -> None:
    replay = "replay" in ATTEMPT
    measurements = {
        "nonFiniteSteps": 0,
        "probeLossRelative": 1e-8,
        "probeGradNormRelative": 1e-7,
        "memoryPeakRatio": 0.3,
        "recompilesAfterWarmup": 0,
        "compileSeconds": 1.5,
        "samplesPerSecondPerProcess": 80.0,
        "finalLoss": loss_after(step),
        **({"replayLossRelative": 1e-7, "replayGradNormRelative": 1e-6, "throughputRatio": 0.9} if replay else {}),
        **CONFIG.get("worse", {}).get(STAGE, {}),
    }
    report = {
        "attempt": ATTEMPT["attempt"],
        "stage": STAGE,
        "exitCode": code,
        "mode": ATTEMPT["mode"],
        "step": step,
        "measurements": measurements,
        "compile": {"mode": ATTEMPT["mode"], "reason": "correct and 1.2x faster"},
    }
    if checkpoint is not None:
        report["checkpoint"] = {"attempt": ATTEMPT["attempt"], "step": checkpoint}
    if failure is not None:
        report["failure"] = failure
    replace(Path(os.environ["CTJ_TERMINATION_FILE"]), report)
    if FIRST:
        OWN.mkdir(parents=True, exist_ok=True)
        replace(OWN / "report.json", report)
    sys.exit(code)


def record(step: int, replay: bool) -> None:
    if not FIRST:
        return
    OWN.mkdir(parents=True, exist_ok=True)
    line = {"step": step, "stage": STAGE, "attempt": ATTEMPT["attempt"], "loss": loss_after(step), "gradNorm": 1.0}
    line |= {"seconds": CONFIG["stepSeconds"], "memoryBytes": 640 * 1024**2, "replay": replay, "at": time.time()}
    with (OWN / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def fill_disk() -> None:
    with contextlib.suppress(OSError), (ROOT / "filler").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def fail_here(step: int) -> int | None:
    fail = CONFIG.get("fail", {})
    wanted = (
        fail.get("stage") == STAGE and fail.get("step") == step and ATTEMPT["attempt"] <= fail.get("attempts", 10**9)
    )
    return fail["code"] if wanted else None


def main() -> None:
    def on_term(*_: object) -> None:
        global terminated  # noqa: PLW0603 - a signal handler has nowhere else to put it
        terminated = True

    signal.signal(signal.SIGTERM, on_term)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if CONFIG.get("worker") else None
    print(f"[rank 0] stage {STAGE} on port {os.environ['CTJ_MASTER_PORT']}", flush=True)
    resumed = newest_checkpoint()
    step = resumed[0] if resumed else 0
    if step < ATTEMPT["floorStep"]:
        end(12, step, None, {"reason": "DataOrStorage", "message": "no checkpoint new enough"})
    checkpoint = None
    every, window = ATTEMPT["training"]["checkpoint"]["everySteps"], ATTEMPT["window"]
    while step < window["endStep"]:
        if control()["stop"] == "Checkpoint" or terminated:
            save(step)
            end(143, step, step)
        time.sleep(CONFIG["stepSeconds"])
        step += 1
        if (code := fail_here(step)) is not None:
            print("[rank 1] Traceback: the loss is gone", flush=True)
            end(
                code,
                step,
                checkpoint,
                {"rank": 1, "reason": "UserCode", "message": "the loss is gone", "lastLines": "line 1"},
            )
        if step == CONFIG.get("fillDiskAt"):
            fill_disk()
        record(step, replay=step <= ATTEMPT.get("replay", {}).get("toStep", 0))
        if step in window["saveAt"] or step % every == 0:
            save(step)
            checkpoint = step
        progress(step, "Training")
    if ATTEMPT["ladder"][-1]["name"] == STAGE:
        (ROOT / "export").mkdir(exist_ok=True)
    if worker is not None:
        worker.kill()
    end(0, step, checkpoint)


if __name__ == "__main__":
    main()
