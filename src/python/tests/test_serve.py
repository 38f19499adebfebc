"""`egmem serve` and its clients, as the package's command line runs them."""

import os
import signal
import subprocess
import sys

import pytest

import egmem

CONFIG = """
listen = ["unix:{folder}/egmem.sock"]
[create]
who = ["*"]
[drain]
deadline = "{deadline}"
"""


class Started:
    """A command, and its lines of standard output and error."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "egmem", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def line(self, words):
        """Reads on to the line that has these words."""
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words} is not in {''.join(seen)}")

    def ended(self):
        self.process.communicate(timeout=300)
        return self.process.returncode


@pytest.fixture
def start():
    """Starts commands; ends those that still run."""
    started = []

    def start(*arguments):
        started.append(Started(*arguments))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()
        command.process.wait()
        command.process.stdout.close()


@pytest.fixture
def serve(start, tmp_path):
    """Starts a service with this time for the drain."""

    def serve(deadline="2min"):
        config = tmp_path / "egmem.toml"
        config.write_text(CONFIG.format(folder=tmp_path, deadline=deadline))
        service = start("serve", "--config", str(config), "--sim", "gh200")
        service.line("ready (simulated)")
        return service

    return serve


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/egmem.sock"


NAME = f"uid:{os.getuid()}/job"


def test_it_serves_and_drains(serve, start, address, driver):
    service = serve()
    assert start("fetch", address, NAME, "--create", "--bytes", "4MiB", "--verify", "--sim", "gh200").ended() == 0
    start("ls", address).line(NAME)
    with egmem.fetch(address, NAME, driver=driver) as memory:
        memory.write(b"from Python")
    service.process.send_signal(signal.SIGHUP)
    service.line("reloaded")
    service.process.terminate()
    service.line("drained")
    assert service.ended() == 0


def test_a_drain_that_is_not_waited_for_has_its_own_status(serve, start, address):
    for deadline, status in (("1s", 3), ("2min", 143)):
        service = serve(deadline)
        holder = start("fetch", address, NAME, "--create", "--bytes", "4MiB", "--hold", "--sim", "gh200")
        holder.line("holding")
        holder.process.send_signal(signal.SIGSTOP)  # so that it does not let go when it is asked to
        os.waitpid(holder.process.pid, os.WUNTRACED)
        service.process.terminate()
        service.line("draining")
        if status == 143:
            service.process.terminate()
            service.line("ended at once by a second SIGTERM")
        # On a slow machine the end itself may take the second that it has.
        assert service.ended() in (status, -signal.SIGKILL if status == 143 else status)
        holder.process.kill()


def test_ctrl_c_and_a_closed_pipe_end_a_watch(serve, start, address):
    serve()
    start("fetch", address, NAME, "--create", "--bytes", "4MiB", "--sim", "gh200").ended()
    watch = start("watch", address)
    watch.line(NAME)
    watch.process.send_signal(signal.SIGINT)
    assert watch.ended() == -signal.SIGINT
    watch = start("watch", address)
    watch.line(NAME)
    watch.process.stdout.close()
    assert watch.process.wait() == 0
