"""Fixtures: simulated drivers. Tests that need a GPU are below gpu/, which pytest runs only on request."""

import subprocess
import sys

import pytest

import egmem

collect_ignore = ["gpu"]


@pytest.fixture
def driver():
    return egmem.simulated("gh200x4")


@pytest.fixture(autouse=True)
def no_default_driver():
    egmem.set_default_driver(None)
    yield
    egmem.set_default_driver(None)


CONFIG = """
listen = ["unix:{folder}/egmem.sock"]

[create]
who = ["*"]
peer_bytes = "64MiB"
peer_names = 3

[[create.prefix]]
peers = ["*"]
names = [""]
"""


@pytest.fixture
def server(tmp_path):
    """A running `egmem serve` on the simulator; its address."""
    config = tmp_path / "egmem.toml"
    config.write_text(CONFIG.format(folder=tmp_path))
    command = [sys.executable, "-m", "egmem", "serve", "--config", str(config), "--sim", "gh200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    assert "listening" in first, first + process.stderr.read()
    yield f"unix:{tmp_path}/egmem.sock"
    process.terminate()
    process.communicate(timeout=300)
