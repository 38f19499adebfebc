"""Events between processes: pickled, and by CUDA's 64 bytes."""

import pickle
import subprocess
import sys
import textwrap

import pytest

import egmem


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setenv("EGMEM_SIM", "gh200")


OTHER = """
    import pickle, sys, egmem
    buffer, theirs = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    assert theirs.imported and theirs.is_done() and theirs.gpu == 0
    stream, ours = egmem.Stream(), egmem.Event(interprocess=True)
    print(pickle.dumps(ours).hex(), flush=True)
    copy = egmem.Buffer(4096)
    for turn in range(3):
        assert sys.stdin.readline() == "recorded\\n"
        stream.wait(theirs)
        buffer.copy_to(copy, stream)
        ours.record(stream)
        print("recorded", flush=True)
        stream.synchronize()
        assert copy.read(4095, 1) == bytes([turn])
    assert sys.stdin.readline() == "end\\n"
"""


def other(code):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_in_order():
    buffer, ours, stream = egmem.Buffer(4096, shareable=True), egmem.Event(interprocess=True), egmem.Stream()
    source = egmem.Buffer(4096)
    with other(OTHER) as child:

        def tell(line):
            child.stdin.write(line + "\n")
            child.stdin.flush()

        tell(pickle.dumps((buffer, ours)).hex())
        theirs = pickle.loads(bytes.fromhex(child.stdout.readline()))
        assert theirs.imported and not ours.imported
        for turn in range(3):
            source.fill(turn)
            source.copy_to(buffer, stream)
            ours.record(stream)
            tell("recorded")
            assert child.stdout.readline() == "recorded\n"
            stream.wait(theirs)
        theirs.synchronize()
        stream.synchronize()
        tell("end")
        assert child.wait(timeout=60) == 0
    with pytest.raises(egmem.Error, match="Owner died"):
        stream.wait(theirs)


def test_the_64_bytes_are_opened_by_another_process():
    event = egmem.Event(interprocess=True)
    handle = event.ipc_handle()
    assert len(handle) == 64 and handle == event.ipc_handle()
    code = f"import egmem; assert egmem.Event.from_ipc_handle(0, bytes.fromhex('{handle.hex()}')).is_done()"
    with other(code) as child:
        assert child.wait(timeout=60) == 0


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="interprocess=True"):
        pickle.dumps(egmem.Event())
    with pytest.raises(egmem.InvalidArgument):
        egmem.Event().ipc_handle()
    with pytest.raises(egmem.InvalidArgument, match="63 bytes"):
        egmem.Event.from_ipc_handle(0, bytes(63))
    with pytest.raises(egmem.DriverError, match="cuIpcOpenEventHandle"):
        egmem.Event.from_ipc_handle(0, bytes(64))
    with pytest.raises(egmem.NoSuchPlace):
        egmem.Event(7, interprocess=True)
    # CUDA opens no event in the process that made it.
    event = egmem.Event(interprocess=True)
    with pytest.raises(egmem.DriverError, match="cuIpcOpenEventHandle"):
        pickle.loads(pickle.dumps(event))


def test_an_event_of_one_process():
    event, stream = egmem.Event(), egmem.Stream()
    assert event.is_done() and event.gpu == 0 and event.handle and hex(event.handle) in repr(event)
    event.record(stream)
    egmem.Stream().wait(event)
    event.synchronize()
