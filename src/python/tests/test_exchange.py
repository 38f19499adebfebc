"""Memory by name, from a running `egmem serve`."""

import os
import socket
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import egmem


def test_memory_is_created_fetched_and_kept(server):
    driver = egmem.simulated("gh200")
    with egmem.connect(server, driver=driver) as client:
        assert client.list() == [] and client.peer_name
        entry = client.create("weights", 1 << 20, node=0)
        assert (entry.name, entry.nbytes) == ("weights", 1 << 20)
        with pytest.raises(egmem.Refused):
            client.create("weights", 1 << 20)
        client.create("weights", "1MiB", node=driver.topology().node(0), exist_ok=True)
        memory = client.fetch("weights", mode="rw")
        assert isinstance(memory, egmem.RemoteBuffer) and memory.name == "weights" and memory.state
        array = np.asarray(memory)
        array[:5] = 7
        with pytest.raises(egmem.InUse):
            memory.release()
        del array
        assert client.list("w")[0].leases == 1
        memory.release()
        assert memory.closed
        assert client.wait("weights", timeout=300).nbytes == 1 << 20
    assert client.closed
    with pytest.raises(egmem.Closed):
        client.list()
    other = egmem.fetch(server, "weights", driver=egmem.simulated("gh200"), mode="r")
    assert other.read(0, 6) == b"\7\7\7\7\7\0" and other.access() == "r"
    for memory in (other, other[1:9]):
        with pytest.raises(egmem.NotAccessible) as caught:
            memory.write(b"x")
        assert 'mode="rw"' in caught.value.remedy
    del memory
    other.close()
    with egmem.connect(server, driver=driver) as client:
        client.delete("weights")
        with pytest.raises(egmem.Error):
            client.fetch("weights")


def test_memory_of_this_machine_needs_no_probe(server):
    driver = egmem.simulated("gh200")
    with egmem.connect(server, driver=driver) as client:
        client.create("weights", 1 << 20, node=0)
        for probe in (True, False):
            memory = client.fetch("weights", probe=probe)
            assert memory.proved is None
            memory.release()
        with pytest.raises(TypeError):
            client.fetch("weights", probe="cpu")
    assert egmem.fetch(server, "weights", driver=driver, probe=False).proved is None


def test_exit_and_fork_with_live_memory(server):
    code = """
        import os, sys, egmem
        client = egmem.connect(sys.argv[1], driver=egmem.simulated())
        client.create("held", 4096)
        memory = client.fetch("held", mode="rw")
        view = memoryview(memory)
        child = os.fork()
        if child == 0:
            try:
                client.list()
            except egmem.InvalidArgument:
                del client, view, memory
                raise SystemExit(6)
            raise SystemExit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        view[0] = 1
        """
    code = textwrap.dedent(code)
    # From Python 3.12 on, os.fork() warns of threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, server]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_memory_that_is_held_is_not_deleted_in_time(server):
    with egmem.connect(server, driver=egmem.simulated("gh200")) as client:
        client.create("weights", 1 << 20)
        memory = client.fetch("weights")
        with pytest.raises(egmem.TimedOut, match=f"weights.* held by .*{os.getpid()}") as caught:
            client.delete("weights", timeout=0)
        assert isinstance(caught.value, TimeoutError) and "refuses" not in str(caught.value)
        memory.release()


def test_a_server_with_tls_is_recognised(driver):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def alert():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"\x15\x03\x03\x00\x02\x02\x0a")
                connection.recv(1 << 20)

        server = threading.Thread(target=alert)
        server.start()
        port = listener.getsockname()[1]
        with pytest.raises(egmem.ConnectionFailed, match="speaks TLS.*give ca, cert and key"):
            egmem.connect(f"tcp://127.0.0.1:{port}", driver=driver, timeout=300)
        server.join()


def test_an_address_to_listen_at_is_none_to_connect_to(driver):
    with pytest.raises(egmem.InvalidArgument, match="tcp://127.0.0.1:7740"):
        egmem.connect("tcp://0.0.0.0:7740", driver=driver)


def test_nobody_listens(driver, tmp_path):
    with pytest.raises(egmem.ConnectionFailed) as caught:
        egmem.connect(f"unix:{tmp_path}/none", driver=driver, timeout=300)
    assert isinstance(caught.value, ConnectionError) and caught.value.remedy
    for wrong in (
        lambda: egmem.connect("nowhere", driver=driver),
        lambda: egmem.connect("unix:/x", driver=driver, timeout=-1),
        lambda: egmem.connect("unix:/x", driver=driver, ca="a"),
    ):
        with pytest.raises(egmem.InvalidArgument):
            wrong()
