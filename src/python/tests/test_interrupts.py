"""Ctrl-C in calls that wait, and exits: each program waits for what never comes, or ends while its server is stopped."""

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import sys, egmem
driver = egmem.simulated("gh200")
address = sys.argv[1]
HOUR = 3600.0  # no call ends by itself
def interrupted(call):
    try:
        call()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return
    raise SystemExit("the call ended by itself")
"""


@contextlib.contextmanager
def program(code, *arguments):
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(code)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def interrupt(child):
    """Sends SIGINT to a program that waits; it must say that the call was interrupted, and end."""
    child.send_signal(signal.SIGINT)
    said, errors = child.communicate()
    assert (said, errors, child.returncode) == ("interrupted\n", "", 0)


def take(connection):
    """Returns the next frame of a connection with its fds; no bytes at the end."""
    whole, fds = b"", []
    while len(whole) < 4 or len(whole) < 4 + struct.unpack(">I", whole[:4])[0]:
        want = 4 if len(whole) < 4 else 4 + struct.unpack(">I", whole[:4])[0]
        more, came, _, _ = socket.recv_fds(connection, want - len(whole), 64)
        fds += came
        if not more:
            return b"", fds
        whole += more
    return whole, fds


class Between:
    """A server's address that passes frames on to a real server, until one does not come through."""

    def __init__(self, path, server):
        self.address = f"unix:{path}"
        self.server = server.removeprefix("unix:")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()

    def keep_back(self, word):
        """Accepts a client, and passes frames on until the client sends one with `word`. From then on it is silent."""
        client, _ = self.listener.accept()
        there = socket.socket(socket.AF_UNIX)
        there.connect(self.server)
        other = {client: there, there: client}
        selector = selectors.DefaultSelector()
        for end in other:
            selector.register(end, selectors.EVENT_READ)
        self.ends = client, there
        while True:
            for key, _ in selector.select():
                frame, fds = take(key.fileobj)
                assert frame, "an end has closed"
                if key.fileobj is client and word in frame:
                    return
                socket.send_fds(other[key.fileobj], [frame], fds)
                for fd in fds:
                    os.close(fd)


@pytest.fixture
def between(tmp_path, server):
    between = Between(tmp_path / "between.sock", server)
    yield between
    for end in (between.listener, *between.ends):
        end.close()


@pytest.mark.parametrize("call", ["egmem.connect(address, driver=driver, timeout=HOUR)", "egmem.fetch(address, 'x', driver=driver, timeout=HOUR)"])
def test_connecting_to_a_silent_server(tmp_path, call):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent.sock"))
        listener.listen()
        with program(f"interrupted(lambda: {call})", f"unix:{tmp_path}/silent.sock") as child:
            connection, _ = listener.accept()
            assert take(connection)[0], "its hello: it waits for the greeting"
            interrupt(child)


@pytest.mark.parametrize(
    "word, call",
    [
        (b"list", "client.list()"),
        (b"wait", "client.wait('x', timeout=HOUR)"),
        (b"fetch", "client.fetch('x')"),
        (b"create", "client.create('x', 4096)"),
        (b"list", "client.create('x', 4096, exist_ok=True)"),
        (b"delete", "client.delete('x', timeout=HOUR)"),
        (b"release", "fetched().release()"),
    ],
)
def test_calls_to_a_server_that_has_fallen_silent(between, word, call):
    code = f"""
        client = egmem.connect(address, driver=driver, timeout=HOUR)
        def fetched():
            client.create("mine", 4096)
            return client.fetch("mine")
        interrupted(lambda: {call})
    """
    with program(code, between.address) as child:
        between.keep_back(word)
        interrupt(child)


def test_a_handler_may_use_the_client_and_lets_the_wait_go_on(server):
    code = """
        import signal
        client = egmem.connect(address, driver=driver, timeout=HOUR)
        def create(number, frame):
            client.create("x", 4096)
            print("created", flush=True)
        signal.signal(signal.SIGUSR1, create)
        print("ready", flush=True)
        print(client.wait("x", timeout=HOUR).name, flush=True)
    """
    with program(code, server) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGUSR1)
        said, errors = child.communicate()
        assert (said, errors, child.returncode) == ("created\nx\n", "", 0)


@contextlib.contextmanager
def stopped(server):
    """Stops a server's process within the block."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.removeprefix("unix:"))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = struct.unpack("3i", peer)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("end, status", [("", 0), ("sys.exit(7)", 7), ("raise SystemExit(8)", 8), ("1 / 0", 1)])
def test_a_program_ends_although_its_server_does_not_answer(server, end, status):
    code = f"""
        client = egmem.connect(address, driver=driver, timeout=HOUR)
        client.create("mine", 4096)
        memory = client.fetch("mine")
        view = memoryview(memory)
        print("holds", flush=True)
        sys.stdin.readline()
        {end}
    """
    with program(code, server) as child:
        assert child.stdout.readline() == "holds\n"
        with stopped(server):
            _, errors = child.communicate("\n")
        assert child.returncode == status
        assert errors == "" or (status == 1 and "ZeroDivisionError" in errors)
