"""Memory that ends while a stream is captured into a CUDA graph: nothing waits for a GPU meanwhile, and nothing is freed too early."""

import gc
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
from test_threads import Copy

import egmem
import egmem.kv

SIZE = 4 << 20
UNKNOWN = 999
GPU = 0


@pytest.fixture
def stream(driver):
    assert egmem.deferred() == (0, 0)
    yield egmem.Stream(0, driver=driver)
    assert egmem.free_deferred() == 0


def a_closed_buffer(driver):
    buffer = egmem.Buffer(SIZE, node=0, driver=driver)
    assert buffer.address
    return [buffer], lambda kept: kept.pop().close()


def a_view(driver):
    return [memoryview(egmem.Buffer(SIZE, node=0, driver=driver))], list.clear


def a_numpy_array(driver):
    return [np.asarray(egmem.Buffer(SIZE, node=0, driver=driver))], list.clear


def a_capsule(driver):
    return [egmem.Buffer(SIZE, node=0, driver=driver).__dlpack__()], list.clear


def a_block(driver):
    block = egmem.Heap(0, driver=driver).allocate(SIZE)
    assert block.address
    return [block], list.clear


def many_blocks(driver):
    blocks = egmem.Heap(0, driver=driver).allocate_many([SIZE // 4] * 4)
    assert len(blocks.addresses) == 4
    return [blocks], list.clear


def closed_blocks(driver):
    blocks = egmem.Heap(0, driver=driver).allocate_many([SIZE])
    assert blocks[0].address
    return [blocks], lambda kept: kept.pop().close()


def an_element_of_blocks(driver):
    return [np.asarray(egmem.Heap(0, driver=driver).allocate_many([SIZE // 2] * 2)[1])], list.clear


@pytest.mark.parametrize(
    "make", [a_closed_buffer, a_view, a_numpy_array, a_capsule, a_block, many_blocks, closed_blocks, an_element_of_blocks]
)
def test_an_end_within_a_capture_waits_for_no_gpu(make, driver, stream):
    kept, end = make(driver)
    copy = Copy(driver)
    with egmem.defer_frees():
        egmem._egmem._begin_capture(driver, GPU, stream.handle)
        end(kept)
        assert egmem.deferred() == (1, SIZE)
        assert egmem.free_deferred() == SIZE, "the capture is under way"
        assert not copy.is_whole(), "nothing waited"
        assert egmem._egmem._end_capture(driver, GPU, stream.handle), "the capture is valid"
    assert egmem.deferred() == (0, 0)
    assert copy.is_whole(), "the memory was freed after the GPU's work"


def test_captures_of_blocking_streams_are_found(driver, stream):
    egmem._egmem._begin_capture(driver, GPU, stream.handle, blocking=True)
    memoryview(egmem.Buffer(SIZE, node=0, driver=driver))
    assert egmem.deferred() == (1, SIZE)
    other = egmem.Buffer(100, node=0, driver=driver)
    assert egmem.deferred() == (1, SIZE)
    assert egmem._egmem._end_capture(driver, GPU, stream.handle)
    heap = egmem.Heap(0, driver=driver)
    assert egmem.deferred() == (1, SIZE)
    heap.allocate(1)
    assert egmem.deferred() == (0, 0), "an allocation frees kept memory"
    del other


def test_memory_stays_where_the_driver_refuses_the_wait(driver, stream):
    free = driver.topology().free_memory(0)
    egmem._egmem._begin_capture(driver, GPU, stream.handle)  # of which nothing tells
    memoryview(egmem.Buffer(SIZE, node=0, driver=driver))
    assert egmem.deferred() == (1, SIZE)
    assert driver.topology().free_memory(0) == free - SIZE
    egmem._egmem._end_capture(driver, GPU, stream.handle)
    assert memoryview(egmem.Buffer(SIZE, node=0, driver=driver)).nbytes == SIZE
    assert egmem.deferred() == (0, 0), "the next wait was for both"
    assert driver.topology().free_memory(0) == free


def test_a_refusal_is_told_by_a_warning(driver, stream):
    egmem._egmem._fail(driver, "cuCtxSynchronize", UNKNOWN, times=2)
    memoryview(egmem.Buffer(SIZE, node=0, driver=driver))
    with pytest.warns(RuntimeWarning, match=f"^{SIZE} bytes of egmem's memory are kept.*cuCtxSynchronize"):
        egmem.Buffer(100, node=0, driver=driver)
    assert egmem.deferred() == (1, SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        egmem.Buffer(100, node=0, driver=driver)
    assert egmem.deferred() == (0, 0)


def test_a_lost_gpu_keeps_nothing(driver, stream):
    buffer = egmem.Buffer(4096, node=0, driver=driver)
    tier = egmem.kv.Tier(pages=1, page_bytes=4096, node=0, driver=driver)
    with tier.prepare_store([b"key"]) as store:
        store.commit()
    others = egmem.kv.Tier(pages=1, page_bytes=4096, node=0, driver=driver)
    gpu_pages = egmem.kv.GpuPages([others.page_address(0)], 4096, 4096, 1)
    with tier.prepare_load([b"key"]) as load:
        job = tier.load(load.pages, [0], gpu_pages, stream=egmem.Stream(0, driver=driver))
    others.close()  # too early: the GPU's context is lost
    with pytest.raises(egmem.ContextLost):
        job.wait()
    assert buffer.address
    del buffer
    assert egmem.deferred() == (0, 0)


def test_holds_are_counted(driver, stream):
    with egmem.defer_frees():
        with egmem.defer_frees():
            memoryview(egmem.Buffer(SIZE, node=0, driver=driver))
        assert egmem.deferred() == (1, SIZE)
    assert egmem.deferred() == (0, 0)


def test_memory_for_a_tier_is_refused_until_gpus_can_be_waited_for(driver, stream):
    buffer = egmem.Buffer(egmem.kv.Tier.bytes_needed(4, 4096), node=0, driver=driver)
    assert buffer.address
    with egmem.defer_frees():
        with pytest.raises(egmem.NotReady, match="captured") as refused:
            egmem.kv.Tier.attach(buffer, pages=4, page_bytes=4096)
        assert "after the capture" in refused.value.remedy
    assert buffer.nbytes, "the buffer has its memory"
    egmem.kv.Tier.attach(buffer, pages=4, page_bytes=4096).close()


def run(program):
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


TORCH = """
import gc, sys, types
import egmem

GPU = 0

class CUDAGraph:
    fails = False

    def capture_begin(self, pool=None):
        if self.fails:
            raise ValueError(pool)
        egmem._egmem._begin_capture(driver, GPU, stream.handle)

    def capture_end(self):
        if self.fails:
            raise ValueError
        return egmem._egmem._end_capture(driver, GPU, stream.handle)

sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(CUDAGraph=CUDAGraph))
driver = egmem.simulated()
stream = egmem.Stream(0, driver=driver)
kept = [memoryview(egmem.Buffer(4096, driver=driver)) for _ in range(4)]  # has egmem notice PyTorch
"""


def test_captures_of_pytorch_are_noticed():
    run(
        TORCH
        + """
graph = CUDAGraph()
for _ in range(2):
    graph.capture_begin()
    kept.pop()
    assert egmem.deferred() == (1, 4096)
    assert graph.capture_end(), "the capture is valid"
    assert egmem.deferred() == (0, 0)
print("done")
"""
    )


def test_captures_of_pytorch_that_fail_hold_nothing():
    run(
        TORCH
        + """
def refused(call):
    try:
        call()
    except ValueError:
        return
    raise AssertionError

graph = CUDAGraph()
graph.fails = True
refused(graph.capture_begin)
kept.pop()
assert egmem.deferred() == (0, 0)
graph.fails = False
graph.capture_begin(pool=1)
graph.fails = True
refused(graph.capture_end)
egmem._egmem._end_capture(driver, GPU, stream.handle)
kept.pop()
assert egmem.deferred() == (0, 0)
graph.fails = False
graph.capture_begin()
kept.pop()
assert egmem.deferred() == (1, 4096)
egmem._egmem._end_capture(driver, GPU, stream.handle)
del graph
gc.collect()
assert egmem.deferred() == (0, 0), "the graph is gone"
print("done")
"""
    )


def test_a_forked_child_has_holds_and_memory_of_its_own():
    run(
        """
        import os, egmem
        parent = egmem.simulated()
        with egmem.defer_frees():
            memoryview(egmem.Buffer(4096, driver=parent))
            child = os.fork()
            if child == 0:
                own = egmem.simulated()
                memoryview(egmem.Buffer(4096, driver=own))
                os._exit(0 if egmem.deferred() == (0, 0) and egmem.free_deferred() == 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert egmem.deferred() == (1, 4096)
        assert egmem.deferred() == (0, 0)
        print("done")
        """
    )
