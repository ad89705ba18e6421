#!/usr/bin/env python3
"""Makes sure the page tests have a headless Chromium: installs Debian's where it may, says how where it may not."""

import os
import shutil
import subprocess
import sys

if shutil.which("chromium") and shutil.which("chromedriver"):
    sys.exit(0)
if os.geteuid() == 0 and shutil.which("apt-get"):
    print("setup: Chromium for the page tests (apt-get install chromium chromium-driver) ...", flush=True)
    subprocess.run(["apt-get", "update", "-qq"], check=False, stdout=subprocess.DEVNULL)
    command = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium", "chromium-driver"]
    done = subprocess.run(
        command, check=False, stdout=subprocess.DEVNULL, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    )
    sys.exit(done.returncode)
sys.exit("No Chromium for the page tests. Install it (as root): apt-get install chromium chromium-driver")
