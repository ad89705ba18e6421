#!/usr/bin/env python3
"""Sets up the environment: `prepare.py run` for `make quickstart`, `prepare.py dev` for tests and benches.

Says what is missing and how to get it before anything is downloaded. Cheap to run again: a stamp of the lock file ends
it in milliseconds. Standard library only, in a syntax that an old Python can still read, since it must refuse one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
# Measured: torch's CUDA build and its libraries take 5.4 GB, the download cache about as much again.
NEEDED_GIB = 12
OLDEST, FIRST_REFUSED = (3, 11), (3, 15)  # torch 2.15 refuses 3.15


def missing_pieces():
    """Return one line for each thing this machine lacks: what, and how to get it."""
    problems = []
    if not OLDEST <= sys.version_info[:2] < FIRST_REFUSED:
        problems.append(
            "This is Python {}.{}; 3.11 to 3.14 work. Install one (apt-get install python3.11 python3.11-venv, or "
            "uv python install 3.11) and say which: make PYTHON=python3.11 quickstart".format(*sys.version_info[:2])
        )
        return problems
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        problems.append("Python's venv module is missing. Install it: apt-get install python3-venv")
    if not (shutil.which("g++") or shutil.which("clang++")):
        problems.append("No C++ compiler (torch.compile and DeepSpeed need one). Install it: apt-get install g++")
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        problems.append("Python.h is missing (compiled kernels include it). Install it: apt-get install python3-dev")
    free = shutil.disk_usage(ROOT).free / 2**30
    if not os.path.exists(PYTHON) and free < NEEDED_GIB:
        problems.append(
            f"{free:.1f} GiB free below {ROOT}; {NEEDED_GIB} are needed for torch and its download. "
            "Free some, or clone onto a larger disk."
        )
    return problems


def run(what, *command):
    """Run one set-up command, saying what it does and how long it took; end with its own words when it fails."""
    print(f"setup: {what} ...", flush=True)
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nsetup: {what} failed with exit code {done.returncode}; the lines above say why.")
    print(f"setup: {what} done in {time.monotonic() - started:.0f} s", flush=True)


def stamp_path(profile, lock):
    """Name the file that says: this lock file is installed."""
    with open(lock, "rb") as file, open(os.path.join(ROOT, "pyproject.toml"), "rb") as project:
        digest = hashlib.sha256(file.read() + project.read()).hexdigest()[:16]
    return os.path.join(VENV, f".{profile}-{digest}")


def main(profile):
    """Bring the environment to `profile`."""
    problems = missing_pieces()
    if problems:
        sys.exit("This machine is not ready:\n" + "\n".join("  - " + line for line in problems))
    lock = os.path.join(ROOT, "requirements", profile + ".lock")
    stamp = stamp_path(profile, lock)
    if os.path.exists(stamp) or (profile == "run" and os.path.exists(stamp_path("dev", lock.replace("run", "dev")))):
        return
    if not os.path.exists(PYTHON):
        run("environment in .venv", sys.executable, "-m", "venv", VENV)
    uv = [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON]
    run("installer", PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", "requirements/bootstrap.lock")
    # Byte code once here, not at each start of each rank: import torch takes 4 s with it and 6 s without.
    options = ("--quiet", "--compile-bytecode", "--require-hashes")
    run("packages (5.4 GB with torch, from the cache if it has them)", *uv, *options, "-r", lock)
    run("this project", *uv, "--quiet", "--no-deps", "-e", ".")
    run("DeepSpeed's communication op (about a minute, once)", PYTHON, "-m", "ctj_trainer.prebuild")
    open(stamp, "w").close()


if __name__ == "__main__":
    main(sys.argv[1])
