"""`egmem serve` and its clients, as the package's command line runs them."""

import os
import pty
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


def test_closed_standard_files_stay_out_of_memory(serve, start, address, tmp_path):
    """The lowest free number goes to the next file that is opened: memory must not get text."""
    serve()
    file = tmp_path / "data"
    words = [sys.executable, "-m", "egmem", "fetch", address, NAME, "--create", "--bytes", "4MiB", "--sim", "gh200"]
    for closed in (">&-", "<&- >&- 2>&-"):
        ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words, "--verify", "--read", str(file)])
        assert ended.returncode == 0
        assert file.read_bytes() == bytes(4 << 20)


def on_a_terminal(*arguments):
    """Runs a command whose standard error is a terminal; returns what that shows."""
    terminal, error = pty.openpty()
    command = [sys.executable, "-m", "egmem", *arguments]
    with os.fdopen(terminal, "rb", buffering=0) as terminal:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=error)
        os.close(error)
        shown = b""
        try:
            while piece := terminal.read(4096):
                shown += piece
        except OSError:  # EIO: nobody has it open any more
            pass
    assert process.wait() == 0, shown
    return shown.decode()


def test_progress_is_shown_on_a_terminal_alone(serve, start, address, tmp_path):
    serve()
    file = tmp_path / "data"
    file.write_bytes(b"x" * (3 << 20))
    create = ("fetch", address, NAME, "--create", "--bytes", "4MiB", "--sim", "gh200")
    for option, shown in (
        (("--write", str(file)), "writing: 0 B of 3 MiB (0 %)"),
        (("--read", str(file)), "reading: 0 B of 4 MiB (0 %)"),
        (("--read", "-"), "reading: 0 B of 4 MiB (0 %)"),
        (("--verify",), "verifying, the CPU reads: 0 B of 4 MiB (0 %)"),
        (("--verify",), "verifying: GPU 0 reads"),
    ):
        text = on_a_terminal(*create, *option)
        assert shown in text and text.endswith("\r\x1b[2K"), text
        ended = subprocess.run([sys.executable, "-m", "egmem", *create, *option], capture_output=True)
        assert ended.returncode == 0 and not ended.stderr


def test_a_reserve_shows_its_progress(tmp_path):
    config = tmp_path / "egmem.toml"
    reserve = '[[reserve]]\nnode = 0\nbytes = "16MiB"\nchunk = "2MiB"\nmin_chunk = "2MiB"\n'
    config.write_text(CONFIG.format(folder=tmp_path, deadline="1s") + reserve)
    terminal, error = pty.openpty()
    command = [sys.executable, "-m", "egmem", "serve", "--config", str(config), "--sim", "gh200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error, text=True)
    os.close(error)
    shown = ""
    while "filling the reserves: " not in shown:
        shown += os.read(terminal, 4096).decode()
    process.terminate()
    process.communicate(timeout=300)
    os.close(terminal)
    assert process.returncode == 0
