"""The loader, on the simulator: python -m pytest examples/python/test_loader.py."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("numpy")
PROGRAM = pathlib.Path(__file__).with_name("loader.py")


def test_workers_fill_every_batch():
    command = [sys.executable, str(PROGRAM)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "EGMEM_SIM": "gh200"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == sorted(f"batch {number} is filled" for number in range(16))


def test_it_is_short():
    assert len(PROGRAM.read_text().splitlines()) <= 35
