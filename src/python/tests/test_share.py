"""Memory for other processes without a server: pickling, share and receive."""

import copy
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

import egmem

METHODS = ["spawn", "forkserver"]
# The bytes of a thread's stack where a test limits the address space.
STACK = 256 << 20
KEPT = []


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setenv("EGMEM_SIM", "gh200")


def process(code, *arguments, **options):
    """Starts Python code in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def end(child):
    """Waits for a process that must end well; returns its output."""
    out, error = child.communicate(timeout=300)
    assert child.returncode == 0, f"{child.returncode}\n{out}\n{error}"
    return out


EXPORTER = """
    import pickle, sys, egmem
    buffer = egmem.Buffer(4096, shareable=True)
    buffer.write(b"exported")
    print(pickle.dumps(buffer).hex(), flush=True)
    sys.stdin.read()
"""


def fill(memory, byte):
    memory.fill(byte)
    KEPT.append(memory)
    return type(memory).__name__, memory.address, memory.nbytes


def run(method, *jobs):
    """Runs each of `jobs`, a function and its arguments, in one worker; returns the results."""
    with multiprocessing.get_context(method).Pool(1) as pool:
        return [pool.apply(work, arguments) for work, *arguments in jobs]


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_has_the_same_bytes(method):
    buffer = egmem.Buffer(3 << 20, shareable=True)
    (name, _, size), *_ = run(method, (fill, buffer, 7), (fill, buffer[10:20], 9))
    assert (name, size) == ("SharedBuffer", 3 << 20)
    assert buffer.read(8, 14) == b"\7\7" + b"\x09" * 10 + b"\7\7"
    buffer.close()


def test_a_worker_maps_the_same_memory_once():
    buffer = egmem.Buffer(4096, shareable=True)
    heap = egmem.Heap(0, shareable=True)
    blocks = [heap.allocate(1000), heap.allocate(5000)]
    jobs = [(fill, buffer, 1), (fill, buffer, 2), (fill, buffer[256:], 3)]
    one, two, part, first, second = run("spawn", *jobs, *((fill, block, 4) for block in blocks))
    assert one[1] == two[1] == part[1] - 256
    assert second[1] - first[1] == blocks[1].address - blocks[0].address, "the heap's chunk is mapped once"
    assert [block.read() for block in blocks] == [b"\4" * 1000, b"\4" * 5000]
    blocks[0].free_after(egmem.Stream(0))


def write_blocks(heap, places):
    """Writes each block's number into it; returns the number of addresses less the offset: that of chunks."""
    blocks = [heap.block(*place) for place in places]
    for number, block in enumerate(blocks):
        block.fill(number)
    assert heap.block(*places[0]).address == blocks[0].address
    heap.close()
    return type(heap).__name__


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_finds_a_heaps_blocks(method):
    with egmem.Heap(0, shareable=True, chunk=4 << 20) as heap:
        blocks = [heap.allocate(size) for size in (100, 1000, 3 << 20, 4 << 20)]
        places = [(block.offset, block.nbytes) for block in blocks]
        assert run(method, (write_blocks, heap, places)) == ["SharedHeap"]
        for number, block in enumerate(blocks):
            assert block.read() == bytes([number]) * block.nbytes


def test_a_heap_keeps_the_chunks_that_others_have():
    heap = egmem.Heap(0, shareable=True, chunk=4 << 20)
    block = heap.allocate(100)
    place, pid = (block.offset, block.nbytes), os.getpid()
    shared = pickle.loads(pickle.dumps(heap))
    assert shared.process == pid and f"process {pid}" in repr(shared)
    found = shared.block(*place)
    found.write(b"x" * 100)
    assert block.read() == b"x" * 100
    block.close()
    assert heap.trim() == 0, "the chunk is kept"
    later = pickle.dumps(heap)
    assert heap.allocate(100).read() == b"x" * 100, "a block is reused"
    for place in [(1 << 30, 5), (1 << 60, 5)]:
        with pytest.raises(egmem.Refused, match="no memory at offset"):
            shared.block(*place)
    with pytest.raises(egmem.InvalidArgument):
        shared.block(block_end(found, shared), 8 << 20)
    heap.close()
    assert shared.block(0, 8).nbytes == 8, "it is mapped"
    with pytest.raises(egmem.Closed, match="has closed what it pickled"):
        shared.block(4 << 30, 8)
    shared.close()
    assert shared.closed and found.read(0, 1) == b"x"
    with pytest.raises(egmem.Closed):
        shared.block(0, 8)
    with pytest.raises(egmem.Closed):
        pickle.loads(later).block(0, 8)
    with pytest.raises(TypeError, match=r"egmem.Heap\(shareable=True\)"):
        pickle.dumps(egmem.Heap(0))


def block_end(block, heap):
    """The offset of the byte behind a block."""
    return block.address - heap.block(0, 1).address + block.nbytes


def test_the_end_of_another_process_ends_what_it_keeps():
    heap = egmem.Heap(0, shareable=True, chunk=4 << 20)
    block = heap.allocate(100)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    worker = spawn.Process(target=hold_block, args=(heap, block.offset, theirs))
    worker.start()
    assert ours.recv_bytes() == b"ready"
    block.close()
    assert heap.trim() == 0
    worker.kill()
    worker.join()
    while heap.trim() == 0:  # until the kernel has told the end of the connection
        pass
    assert heap.backed == 0


def hold_block(heap, offset, ready):
    KEPT.append(heap)
    hold(heap.block(offset, 100), ready)


def test_a_temporary_object_can_be_sent():
    """As `Process(args=(buffer,))` does, which drops its arguments, and a worker of a pool that returns memory."""
    buffer = egmem.Buffer(4096, shareable=True)
    buffer.write(b"kept")
    pickled = pickle.dumps(buffer)
    del buffer
    assert pickle.loads(pickled).read(0, 4) == b"kept"
    part = pickle.dumps(egmem.Buffer(4096, shareable=True)[10:20])
    assert pickle.loads(part).nbytes == 10
    with pytest.raises(egmem.InvalidArgument, match="0 bytes"):
        pickle.dumps(egmem.Buffer(4096, shareable=True)[5:5])


def returned(number):
    made = egmem.Buffer(4096, shareable=True)
    made.fill(number)
    return made


def test_workers_return_memory():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(returned, range(4))
    assert [memory.read(0, 1) for memory in found] == [bytes([number]) for number in range(4)]


def test_a_worker_may_do_what_its_parent_may():
    buffer = egmem.Buffer(4096, host="r", shareable=True)
    received = pickle.loads(pickle.dumps(buffer))
    assert received.access() == "r" and memoryview(received).readonly


def test_a_heap_is_not_copied():
    heap = egmem.Heap(0, shareable=True)
    for copier in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not copied"):
            copier(heap)


def test_what_cannot_be_pickled_says_why():
    closed = egmem.Buffer(10, shareable=True)
    pickled = pickle.dumps(closed[:5])
    closed.close()
    with pytest.raises(egmem.Closed, match=r"has closed what it pickled.* keep it open"):
        pickle.loads(pickled)
    shared = egmem.Buffer(10, shareable=True)
    received = pickle.loads(pickle.dumps(shared))
    for memory, remedy in [
        (egmem.Buffer(10), r"this Buffer .* egmem.Buffer\(nbytes, shareable=True\)"),
        (egmem.Buffer(10)[2:], r"this Slice .* egmem.Buffer\(nbytes, shareable=True\)"),
        (egmem.Heap(0).allocate(10), r"this Block .* egmem.Heap\(shareable=True\)"),
        (egmem.Pool(0).allocate(10), "belongs to a pool"),
        (received, "share it from the process that made it"),
    ]:
        with pytest.raises(TypeError, match=remedy):
            pickle.dumps(memory)
        with pytest.raises(TypeError, match=remedy):
            memory.share("/nowhere")
    for copier in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="copy_to"):
            copier(shared)


def test_a_pickle_is_for_one_process_and_needs_its_memory():
    buffer = egmem.Buffer(4096, shareable=True)
    pickled = pickle.dumps(buffer)
    pickle.loads(pickled).write(b"once")
    assert buffer.read(0, 4) == b"once"
    with pytest.raises(egmem.Refused, match="once for each process"):
        pickle.loads(pickled)
    late = pickle.dumps(buffer)
    buffer.close()
    with pytest.raises(egmem.Closed, match="keep it open there until"):
        pickle.loads(late)


def test_a_guessed_ticket_gets_nothing():
    buffer = egmem.Buffer(4096, shareable=True)
    receive, (name, ticket, pid, *kind) = buffer.__reduce__()
    number, secret = ticket.split("-")
    assert len(secret) == 32
    for guess in (f"{number}-{'0' * 32}", f"9{number}-{secret}", "", "-", "x" * 1000):
        with pytest.raises(egmem.Refused):
            receive(name, guess, pid, *kind)
    assert receive(name, ticket, pid, *kind).nbytes == 4096


def test_memory_of_another_kind_of_driver_is_refused():
    receive, (name, ticket, pid, _, kind) = egmem.Buffer(10, shareable=True).__reduce__()
    with pytest.raises(egmem.NotSupported, match="set EGMEM_SIM for both"):
        receive(name, ticket, pid, False, kind)


def test_the_exporter_may_end_first():
    with process(EXPORTER) as exporter:
        first = bytes.fromhex(exporter.stdout.readline())
        received = pickle.loads(first)
        exporter.kill()
    assert received.read(0, 8) == b"exported"
    received.write(b"still")
    assert received.read(0, 8) == b"stillted"
    with process(EXPORTER) as exporter:
        late = bytes.fromhex(exporter.stdout.readline())
        end(exporter)
    with pytest.raises(egmem.ConnectionFailed, match="has ended"):
        pickle.loads(late)


def hold(memory, ready):
    KEPT.append(memory)
    ready.send_bytes(b"ready")
    signal.pause()


def fds():
    return set(os.listdir("/proc/self/fd"))


def test_a_killed_worker_leaves_nothing():
    buffer = egmem.Buffer(2 << 20, shareable=True)
    spawn = multiprocessing.get_context("spawn")
    pickle.loads(pickle.dumps(buffer)).close()  # the socket, and an fd that is kept
    before = None
    for _ in range(3):
        ours, theirs = spawn.Pipe()
        worker = spawn.Process(target=hold, args=(buffer, theirs))
        worker.start()
        assert ours.recv_bytes() == b"ready"
        worker.kill()
        worker.join()
        worker.close()
        ours.close()
        theirs.close()
        before = before or fds()
    assert len(fds()) <= len(before)
    never = [pickle.dumps(buffer) for _ in range(100)]
    assert len(fds()) <= len(before) and never
    buffer.close()


def test_a_pickle_whose_thread_cannot_start_raises_and_the_next_one_goes_on():
    """The first pickle starts two threads. With room for the stack of one, the second one cannot start."""
    child = process(
        """
        import os, pathlib, pickle, resource, egmem

        def threads():
            return len(os.listdir("/proc/self/task"))

        buffer = egmem.Buffer(4096, shareable=True)
        before = threads()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        room = pages * resource.getpagesize() + STACK * 3 // 2
        resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
        for _ in range(3):
            try:
                pickle.dumps(buffer)
            except egmem.Error as error:
                assert "making a socket for pickled memory" in str(error), error
            else:
                raise AssertionError("a thread started without room for its stack")
            assert threads() == before + 1
        resource.setrlimit(resource.RLIMIT_AS, limits)
        pickled = pickle.dumps(buffer)
        assert threads() == before + 2, (threads(), before)
        assert pickle.loads(pickled).nbytes == 4096
        """.replace("STACK", str(STACK)),
        env={**os.environ, "RUST_MIN_STACK": str(STACK)},
    )
    end(child)


def test_a_forked_worker_is_refused():
    buffer = egmem.Buffer(4096, shareable=True)
    child = process(
        """
        import os, pickle, egmem
        buffer = egmem.Buffer(4096, shareable=True)
        pickled = pickle.dumps(buffer)
        child = os.fork()
        if child == 0:
            refused = 0
            for work in (lambda: pickle.loads(pickled), lambda: pickle.dumps(buffer), lambda: buffer.share("x")):
                try:
                    work()
                except egmem.InvalidArgument as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        pickle.loads(pickled)
        """
    )
    end(child)
    buffer.close()


def test_share_and_receive(tmp_path):
    path = tmp_path / "socket"
    buffer = egmem.Buffer(4096, shareable=True)
    code = "import sys, egmem; egmem.receive(sys.argv[1], timeout=60).write(sys.argv[2].encode(), int(sys.argv[3]))"
    early = process(code, path, "early", 0)  # it waits for the socket
    with buffer.share(path) as offer:
        assert offer.path == str(path) and not offer.closed
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        end(early)
        end(process(code, path, "late", 5))
        assert buffer.read(0, 9) == b"earlylate"
        received = egmem.receive(path)
        assert received.node == 0 and not memoryview(received).readonly
        with pytest.raises(egmem.Error, match="in use"):
            buffer.share(path)
        with pytest.raises(egmem.InUse):
            buffer.close()
    assert offer.closed and not path.exists()
    offer.close()
    buffer.close()
    assert received.read(0, 5) == b"early"
    with pytest.raises(egmem.ConnectionFailed):
        egmem.receive(path, timeout=0)


def test_a_slice_is_shared_alone(tmp_path):
    buffer = egmem.Buffer(4096, shareable=True)
    buffer.fill(1)
    with buffer[100:200].share(tmp_path / "socket"):
        received = egmem.receive(tmp_path / "socket")
    assert received.nbytes == 100
    received.fill(2)
    assert buffer.read() == b"\1" * 100 + b"\2" * 100 + b"\1" * 3896


def test_read_only(tmp_path):
    buffer = egmem.Buffer(4096, shareable=True)
    with buffer.share(tmp_path / "r", mode="r"), buffer.share(tmp_path / "rw"):
        for received in (egmem.receive(tmp_path / "r"), egmem.receive(tmp_path / "rw", mode="r")):
            assert memoryview(received).readonly
            assert (received.access(), received.access(0)) == ("r", "r")
            for memory in (received, received[1:]):
                with pytest.raises(egmem.NotAccessible, match='receive it with mode="rw"'):
                    memory.write(b"x")
        with pytest.raises(egmem.InvalidArgument, match='share it with mode="rw"'):
            egmem.receive(tmp_path / "r", mode="rw")
    for call in (lambda: buffer.share("x", mode=""), lambda: egmem.receive("x", mode="w", timeout=0)):
        with pytest.raises(egmem.InvalidArgument, match='valid: "rw", "r"'):
            call()


def test_an_offer_ends_with_its_object_and_with_the_process(tmp_path):
    buffer = egmem.Buffer(4096, shareable=True)
    buffer.share(tmp_path / "socket")
    assert not (tmp_path / "socket").exists()
    buffer.close()
    child = process(
        """
        import sys, egmem
        class Keeps:
            pass
        kept = Keeps()
        kept.itself = kept
        kept.offer = egmem.Buffer(10, shareable=True).share(sys.argv[1])
        """,
        tmp_path / "left",
    )
    assert end(child) == "" and not (tmp_path / "left").exists()


@pytest.mark.parametrize("listening", [False, True])
def test_ctrl_c_ends_receive(tmp_path, listening):
    import socket

    silent = socket.socket(socket.AF_UNIX)
    if listening:
        silent.bind(str(tmp_path / "socket"))
        silent.listen()
    child = process(
        """
        import sys, egmem
        egmem.default_driver()
        try:
            print("receiving", flush=True)
            egmem.receive(sys.argv[1], timeout=3000)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
        tmp_path / "socket",
    )
    assert child.stdout.readline() == "receiving\n"
    connection = silent.accept()[0] if listening else None
    child.send_signal(signal.SIGINT)
    assert end(child) == "interrupted\n"
    assert not connection or connection.recv(1) == b""
    silent.close()


def test_many_at_once(tmp_path):
    buffer = egmem.Buffer(1 << 20, shareable=True)
    done = []

    def work(number):
        for _ in range(10):
            received = pickle.loads(pickle.dumps(buffer[number * 100 : number * 100 + 100]))
            received.fill(number)
            done.append(egmem.receive(tmp_path / "socket", timeout=60).read(number * 100, 100) == bytes([number]) * 100)

    with buffer.share(tmp_path / "socket"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert done == [True] * 80
