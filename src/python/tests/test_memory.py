"""Buffers: reading, writing, closing, and their properties."""

import gc
import os
import signal
import threading

import pytest

import egmem
import egmem.kv


def test_a_buffer_tells_node_size_and_access(driver):
    buffer = egmem.Buffer(3 << 20, node=2, driver=driver)
    assert (buffer.node, buffer.nbytes, len(buffer), buffer.padded) == (2, 3 << 20, 3 << 20, 4 << 20)
    assert buffer.location == "host NUMA node 2" and buffer.driver == driver
    assert buffer.access() == "rw" and buffer.access(3) == "rw"
    text = repr(buffer)
    assert "3 MiB" in text and "host NUMA node 2" in text and "SIMULATED" in text and hex(buffer.address) in text
    assert ", CPU rw, GPUs rw" in text
    assert ", CPU r, GPU 1 rw, SIM" in repr(egmem.Buffer(1, access_by=[1], host="r", driver=driver))
    assert "CPU" not in repr(egmem.Buffer(1, host="", driver=driver))


def test_a_buffer_tells_what_it_is_and_why(driver):
    discrete = egmem.simulated("h200x8")

    def told(of, **options):
        buffer = egmem.Buffer("3MiB", node=0, driver=of, **options)
        buffer.fill(7)
        assert buffer.read(buffer.nbytes - 1) == b"\7"
        return buffer.backing, buffer.backing_reason

    asked = "the program asked for it"
    assert told(discrete) == told(discrete, backing="driver") == ("driver", asked)
    assert told(discrete, backing="registered") == ("registered", asked)
    assert told(discrete, backing="auto") == ("registered", "registered memory is pinned faster")
    assert told(driver, backing="auto") == ("driver", "registered memory was never measured on coherent machines")
    large = [egmem.Buffer(size, 0, backing="auto", one_copy=True, driver=discrete) for size in ("64MiB", "65MiB")]
    assert [buffer.backing for buffer in large] == ["registered", "driver"]
    assert large[1].backing_reason == "one copy does not cross the chunks of registered memory"
    on_gpu = egmem.Buffer(1, device=1, backing="auto", driver=discrete)
    assert (on_gpu.backing, on_gpu.backing_reason) == ("driver", "registered memory needs a host node")
    kinds = []
    for backing in ("driver", "registered"):
        buffer = egmem.Buffer(1, node=0, label="mine", backing=backing, driver=discrete)
        kinds += [entry.kind for entry in egmem.allocations() if entry.address == buffer.address]
    assert kinds == ["vmm", "registered"]


def test_places(driver):
    assert egmem.Buffer(1, driver=driver).node == 0
    assert egmem.Buffer(1, near_gpu=3, driver=driver).node == 3
    on_gpu = egmem.Buffer(1, device=1, driver=driver)
    assert on_gpu.node is None and on_gpu.location == "GPU 1" and on_gpu.access() == ""
    with pytest.raises(egmem.InvalidArgument, match="exclude"):
        egmem.Buffer(1, node=0, near_gpu=1, driver=driver)
    with pytest.raises(egmem.InvalidArgument, match="spread"):
        egmem.Buffer(1, node=0, spread=True, driver=driver)


def test_spread_memory_is_on_several_nodes(driver):
    buffer = egmem.Buffer("64MiB", spread=True, driver=driver)
    assert buffer.nbytes == 64 << 20
    assert buffer.node is None and buffer.nodes == [0, 1, 2, 3]
    assert buffer.location == "host NUMA nodes 0, 1, 2, 3" and "on host NUMA nodes 0, 1, 2, 3 at" in repr(buffer)
    one = egmem.Buffer(1, spread=True, driver=egmem.simulated("gh200"))
    assert (one.node, one.nodes, one.location) == (0, [0], "host NUMA node 0")
    on_gpu = egmem.Buffer(1, device=1, driver=driver)
    assert (on_gpu.node, on_gpu.nodes, on_gpu.location) == (None, [], "GPU 1")
    tier = egmem.kv.Tier.attach(buffer, page_bytes="4KiB")
    with tier.prepare_store([b"key"]) as store:
        page = store.view(0)
        assert page.node is None and page.location == "the host"
        del page
        store.close()


def test_memory_of_a_gpu_is_not_the_cpus(driver):
    buffer = egmem.Buffer(16, device=1, driver=driver)
    for call in (lambda: buffer.write(b"x"), buffer.read, lambda: buffer.fill(0), lambda: memoryview(buffer)):
        with pytest.raises(egmem.NotAccessible, match="no access to memory of GPU 1") as caught:
            call()
        assert "copy_to" in caught.value.remedy and 'on("cuda:1")' in caught.value.remedy


def test_access_is_granted_as_told(driver):
    buffer = egmem.Buffer(1, access_by=[1], host="r", driver=driver)
    assert (buffer.access(), buffer.access(1), buffer.access(0)) == ("r", "rw", "")
    with pytest.raises(egmem.NotAccessible):
        buffer.fill(1)
    assert memoryview(buffer).readonly
    for call in (lambda: buffer.write(b"x"), lambda: buffer.fill(1)):
        with pytest.raises(egmem.NotAccessible, match="the CPU may only read") as caught:
            call()
        assert 'host="rw"' in caught.value.remedy
    with pytest.raises(egmem.NotAccessible):
        memoryview(egmem.Buffer(1, host="", driver=driver))
    with pytest.raises(egmem.InvalidArgument, match="host"):
        egmem.Buffer(1, host="w", driver=driver)


def test_bytes_come_back(driver):
    buffer = egmem.Buffer(1000, driver=driver)
    buffer.write(b"abc", 10)
    buffer.write(bytearray(b"de"), offset=13)
    buffer.write(memoryview(b"fg"), 15)
    assert buffer.read(9, 9) == b"\0abcdefg\0"
    buffer.fill(7, 998)
    assert buffer.read(997) == b"\0\7\7" and buffer.read(1000) == b""
    for offset, length in ((999, 2), (1001, 0), (2**63, 1), (0, 2**63)):
        with pytest.raises(egmem.InvalidArgument):
            buffer.read(offset, length)
    with pytest.raises(egmem.InvalidArgument):
        buffer.write(b"xy", 999)
    with pytest.raises(egmem.InvalidArgument):
        buffer.fill(0, 1, 1000)


def test_the_buffer_protocol(driver):
    buffer = egmem.Buffer(4096, driver=driver)
    view = memoryview(buffer)
    assert (view.nbytes, view.itemsize, view.format, view.shape, view.strides) == (4096, 1, "B", (4096,), (1,))
    assert view.contiguous and not view.readonly and view.obj is buffer
    view[0] = 9
    view.cast("i")[1] = -2
    assert buffer.read(0, 8) == b"\x09\0\0\0\xfe\xff\xff\xff"
    assert bytes(buffer) == buffer.read()


def test_closing_with_views_is_refused(driver):
    buffer = egmem.Buffer(4096, driver=driver)
    view = memoryview(buffer)
    with pytest.raises(BufferError, match="1 live view") as caught:
        buffer.close()
    assert isinstance(caught.value, egmem.InUse)
    assert not buffer.closed and buffer.nbytes == 4096
    view.release()
    buffer.close()
    buffer.close()
    assert buffer.closed and "closed" in repr(buffer)
    for use in (buffer.read, lambda: memoryview(buffer), lambda: buffer.nbytes, lambda: buffer.on("cpu"), buffer.__dlpack__):
        with pytest.raises(egmem.Closed):
            use()


def test_a_context_closes(driver):
    with egmem.Buffer(1, driver=driver) as buffer:
        assert not buffer.closed
    assert buffer.closed
    with pytest.raises(egmem.InUse):
        with egmem.Buffer(1, driver=driver) as buffer:
            view = memoryview(buffer)
    with pytest.raises(KeyError):  # and not InUse, which would hide it
        with egmem.Buffer(1, driver=driver) as other:
            other_view = memoryview(other)
            raise KeyError
    del view, other_view


def test_memory_is_freed_with_its_last_view(driver):
    topology = driver.topology()
    free = topology.free_memory(0)
    buffer = egmem.Buffer(8 << 20, node=0, driver=driver)
    view = memoryview(buffer)[10:20]
    del buffer
    gc.collect()
    assert topology.free_memory(0) == free - (8 << 20)
    view[0] = 1
    del view
    gc.collect()
    assert topology.free_memory(0) == free


def test_subclasses_work(driver):
    class Mine(egmem.Buffer):
        extra = 1

    mine = Mine(100, driver=driver)
    mine.note = "x"
    assert bytes(memoryview(mine)[:1]) == b"\0" and isinstance(mine, egmem.Memory)
    del mine
    gc.collect()


def test_base_types_are_not_made_by_calling():
    for kind in (egmem.Memory, egmem.Block, egmem.PoolBlock, egmem.View, egmem.Driver):
        with pytest.raises(TypeError):
            kind()


def test_progress_is_told_and_an_exception_gives_everything_back(driver):
    told = []
    chunk, size = 64 << 20, (128 << 20) + 1
    buffer = egmem.Buffer(size, node=0, driver=driver, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, buffer.padded) for done in (chunk, 2 * chunk, buffer.padded)]
    buffer.close()
    free = driver.topology().free_memory(0)

    class Stop(Exception):
        pass

    def stop(done, total):
        assert driver.topology().free_memory(0) == free - done
        if done > chunk:
            raise Stop

    with pytest.raises(Stop):
        egmem.Buffer(size, node=0, driver=driver, progress=stop)
    assert driver.topology().free_memory(0) == free
    with pytest.raises(TypeError):
        egmem.Buffer(1, driver=driver, progress=1)


def test_a_signal_between_chunks_gives_everything_back(driver):
    free = driver.topology().free_memory(0)
    done = []

    def interrupt(now, total):
        done.append(now)
        signal.raise_signal(signal.SIGINT)

    # A program that was started in the background of a script ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            egmem.Buffer(64 << 20, node=0, gentle=True, driver=driver, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [16 << 20]
    assert driver.topology().free_memory(0) == free


def test_a_signal_is_seen_between_chunks_without_a_progress_function(driver):
    size = 8 << 30
    free = driver.topology().free_memory(0)
    left = []

    def handle(number, frame):
        left.append(driver.topology().free_memory(0))
        raise KeyboardInterrupt

    def send():
        while driver.topology().free_memory(0) == free:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            egmem.Buffer(size, node=0, gentle=True, driver=driver)
    finally:
        signal.signal(signal.SIGINT, before)
        sender.join()
    # In the middle: some of it existed.
    assert len(left) == 1 and free - size < left[0] < free
    assert driver.topology().free_memory(0) == free
