"""The `ctj` command line. Every module here is imported by the command that needs it, so that help stays instant."""

from pathlib import Path

DEFAULT_WORK_DIR = Path("ctj-runs")
"""Folder of local jobs, below the folder a command is typed in."""
