"""Parts of memory, and copies between memories."""

import pytest

import egmem
import egmem.kv


@pytest.fixture
def buffer(driver):
    buffer = egmem.Buffer(4096, driver=driver)
    buffer.write(bytes(range(256)) * 16)
    return buffer


def test_slices_are_pythons(buffer):
    model = buffer.read()
    for ends in ((10, 20), (None, None), (-10, None), (None, -4000), (5000, 6000), (9, 3), (-9, 9999)):
        index = slice(*ends)
        part = buffer[index]
        assert part.read() == model[index] == bytes(memoryview(part))
        assert part.nbytes == len(model[index])
    part = buffer[100:300]
    assert (part.offset, part.address, part.nbytes) == (100, buffer.address + 100, 200)
    inner = part[-50:]
    assert (type(inner), inner.offset, inner.read()) == (egmem.Slice, 250, model[250:300])
    assert (inner.node, inner.location, inner.driver, inner.access()) == (0, buffer.location, buffer.driver, "rw")


def test_what_is_no_slice_is_refused(buffer):
    for index in (0, -1, "a", (1, 2), None):
        with pytest.raises(TypeError, match=r"memory\[a:b\]"):
            buffer[index]
    for step in (2, -1):
        with pytest.raises(egmem.InvalidArgument, match="step 1"):
            buffer[::step]
    with pytest.raises(TypeError):
        buffer[1:2] = b"x"
    with pytest.raises(TypeError):
        iter(buffer).__next__()
    with pytest.raises(TypeError):
        egmem.Slice()


def test_a_slice_is_memory(buffer):
    numpy = pytest.importorskip("numpy")
    part = buffer[1024:2048]
    part.write(b"part", 4)
    part.fill(7, 1000)
    assert buffer.read(1028, 4) == b"part" and buffer.read(2024, 26) == b"\7" * 24 + b"\0\1"
    array = numpy.asarray(part.view("int32", (16, 16)))
    array[:] = 5
    assert buffer.read(1024, 4) == b"\5\0\0\0" and numpy.from_dlpack(part).shape == (1024,)
    for call in (lambda: part.read(1020, 5), lambda: part.write(b"12345", 1020), lambda: part.fill(1, 1020, 5)):
        with pytest.raises(egmem.InvalidArgument):
            call()


def test_a_slice_keeps_its_memory(buffer):
    part = buffer[10:]
    inner = part[10:]
    part.close()
    assert part.closed
    with pytest.raises(egmem.InUse):
        buffer.close()
    del buffer
    assert inner.read(0, 4) == b"\x14\x15\x16\x17"
    inner.close()
    with pytest.raises(egmem.Closed):
        inner[1:]


def test_slices_of_all_kinds(driver):
    block, pooled = egmem.Heap(0, driver=driver).allocate(100), egmem.Pool(0, driver=driver).allocate(100)
    for memory in (block, pooled):
        memory.fill(0)
        memory[50:].fill(1)
        assert memory.read() == b"\0" * 50 + b"\1" * 50
    with egmem.Buffer(100, device=0, driver=driver) as gpu:
        assert gpu[10:].location == "GPU 0" and gpu[10:].access(0) == "rw"


def test_copies_by_the_cpu(driver, buffer):
    target = egmem.Heap(1, driver=driver).allocate(4096)
    buffer.copy_to(target)
    assert target.read() == buffer.read()
    buffer[:100].copy_to(target[200:300])
    assert target.read(200, 100) == buffer.read(0, 100)
    model = bytearray(buffer.read())
    model[1:101] = model[:100]
    buffer[:100].copy_to(buffer[1:101])
    assert buffer.read() == model, "as memmove does"
    buffer[:0].copy_to(target[:0])


def test_copies_by_a_gpu(driver, buffer):
    stream = egmem.Stream(1, driver=driver)
    gpu = egmem.Buffer(4096, device=0, driver=driver)
    back = egmem.Buffer(4096, driver=driver)
    buffer.copy_to(gpu, stream)
    gpu.copy_to(back, stream)
    stream.synchronize()
    assert back.read() == buffer.read()
    back.fill(0)
    gpu[4000:].copy_to(back[:96])
    assert back.read(0, 97) == buffer.read(4000, 96) + b"\0"
    for memory in (buffer, gpu, back):
        memory.close()


def test_a_copy_on_a_stream_keeps_both(driver):
    for _ in range(50):
        stream = egmem.Stream(0, driver=driver)
        source, target = egmem.Buffer(2 << 20, driver=driver), egmem.Buffer(2 << 20, driver=driver)
        source.fill(3)
        source.copy_to(target, stream)
        del source
        stream.synchronize()
        assert target.read(-1 + (2 << 20)) == b"\3"
        target.close()


def test_a_pool_s_memory_is_read_after_the_stream_that_it_was_allocated_for(driver):
    stream = egmem.Stream(0, driver=driver)
    source = egmem.Buffer(4 << 20, driver=driver)
    source.fill(7)
    block = egmem.Pool(0, driver=driver).allocate(4 << 20, stream)
    source.copy_to(block, stream)
    assert block.read() == source.read()


def test_memory_is_given_up_once_its_copies_have_run(driver, buffer, server):
    stream = egmem.Stream(0, driver=driver)
    heap = egmem.Heap(0, driver=driver)
    live = heap.stats()["live_blocks"]
    many = heap.allocate_many([4096, 4096])
    memories = [heap.allocate(4096), egmem.Pool(0, driver=driver).allocate(4096), many]
    for memory in memories:
        buffer.copy_to(memory[1] if memory is many else memory, stream)
        stream.synchronize()
        memory.free_after(stream)
    stream.synchronize()
    heap.collect(wait=True)
    assert heap.stats()["live_blocks"] == live

    block = heap.allocate(4096)
    buffer.copy_to(block, stream)
    egmem._egmem._fail(driver, "cuEventQuery", 600)  # "not ready"
    with pytest.raises(egmem.InUse, match="copies on streams") as refused:
        block.free_after(stream)
    assert "stream.synchronize()" in refused.value.remedy

    with egmem.connect(server, driver=driver) as client:
        client.create("memory", 4096)
        remote = client.fetch("memory", mode="rw")
        buffer.copy_to(remote, stream)
        stream.synchronize()
        remote.release()
    tiers_memory = egmem.Buffer(4 << 20, driver=driver)
    tiers_memory[:4096].copy_to(buffer, stream)
    stream.synchronize()
    egmem.kv.Tier.attach(tiers_memory, page_bytes=4096)


def test_copies_that_cannot_be_are_refused(driver, buffer):
    stream = egmem.Stream(0, driver=driver)
    other = egmem.Buffer(4096, driver=egmem.simulated("gh200"))
    read_only = egmem.Buffer(4096, host="r", driver=driver)
    with pytest.raises(egmem.InvalidArgument, match=r"4095 bytes and the source 4096; slices"):
        buffer.copy_to(egmem.Buffer(4095, driver=driver))
    with pytest.raises(egmem.InvalidArgument, match="overlap"):
        buffer[:100].copy_to(buffer[50:150], stream)
    with pytest.raises(egmem.InvalidArgument):
        buffer.copy_to(other, stream)
    with pytest.raises(egmem.NotAccessible):
        buffer.copy_to(read_only)
    with pytest.raises(egmem.NotAccessible):
        buffer.copy_to(egmem.Buffer(4096, access_by=[1], host="", driver=driver), stream)
    with pytest.raises(TypeError):
        buffer.copy_to(bytearray(4096))
    egmem._egmem._begin_capture(driver, 0, stream.handle)
    with pytest.raises(egmem.InvalidArgument, match="captured"):
        buffer.copy_to(egmem.Buffer(4096, driver=driver), stream)
    assert egmem._egmem._end_capture(driver, 0, stream.handle), "the capture goes on"
    buffer.close()
    with pytest.raises(egmem.Closed):
        buffer.copy_to(other)
