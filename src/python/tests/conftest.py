"""Fixtures: simulated drivers. Tests that need a GPU are below gpu/, which pytest runs only on request."""

import contextlib
import signal
import subprocess
import sys

import pytest

import egmem

collect_ignore = ["gpu"]

# A shell's job in the background ignores SIGINT, and so would the programs that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@contextlib.contextmanager
def serving(folder, settings=CONFIG):
    """Runs `egmem serve` on the simulator, with its socket in a folder; returns its address."""
    config = folder / "egmem.toml"
    config.write_text(settings.format(folder=folder))
    command = [sys.executable, "-m", "egmem", "serve", "--config", str(config), "--sim", "gh200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    assert "listening" in first, first + process.stderr.read()
    yield f"unix:{folder}/egmem.sock"
    process.terminate()
    process.communicate(timeout=300)


@pytest.fixture
def server(tmp_path):
    """A running `egmem serve` on the simulator; its address."""
    with serving(tmp_path) as address:
        yield address
