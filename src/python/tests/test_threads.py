"""Threads: calls of one with an object while another is in a call of it. A deadlock cannot be ended from within, so each
program is a process of its own."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import egmem
import egmem.kv


def run(program):
    """Runs a program, which prints "done"."""
    code = "import sys, threading, egmem, egmem.kv\n" + textwrap.dedent(program) + "\nprint('done')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


# `both(one, other)`: runs two functions, until both have run often enough. The interpreter switches threads as often
# as it can.
BOTH = """
sys.setswitchinterval(1e-6)
failures = []

def both(*functions, turns=20000):
    def often(function):
        try:
            for _ in range(turns):
                function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=often, args=[function], daemon=True) for function in functions]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures

def refused(kind, function):
    try:
        function()
    except kind:
        return
    raise AssertionError(f"{function} raises no {kind}")

driver = egmem.simulated("gh200")
"""


PAIRS = {
    "a buffer with a view": """
buffer = egmem.Buffer(4096, driver=driver)
view = memoryview(buffer)
both(lambda: refused(egmem.InUse, buffer.close), lambda: buffer.nbytes)
""",
    "a buffer whose array interface was read": """
buffer = egmem.Buffer(4096, driver=driver)
buffer.__array_interface__
both(lambda: refused(egmem.InUse, buffer.close), lambda: buffer.nbytes)
""",
    "a closed buffer": """
buffer = egmem.Buffer(4096, driver=driver)
buffer.close()
both(lambda: refused(egmem.Closed, lambda: buffer.nbytes), lambda: buffer.closed)
""",
    "a closed buffer's array interface": """
buffer = egmem.Buffer(4096, driver=driver)
buffer.close()
both(lambda: refused(egmem.Closed, lambda: buffer.__array_interface__), lambda: buffer.closed)
""",
    "a closed heap": """
heap = egmem.Heap(0, driver=driver)
heap.close()
both(lambda: refused(egmem.Closed, heap.stats), lambda: heap.closed)
""",
    "a closed pool": """
pool = egmem.Pool(0, driver=driver)
pool.close()
both(lambda: refused(egmem.Closed, pool.stats), lambda: pool.closed)
""",
    "a closed load": """
load = egmem.kv.Tier(pages=1, page_bytes=4096, driver=driver).prepare_load([])
load.release()
both(*[lambda: refused(egmem.Closed, lambda: load.pages)] * 2)
""",
    "a closed store": """
store = egmem.kv.Tier(pages=1, page_bytes=4096, driver=driver).prepare_store([])
store.close()
both(lambda: refused(egmem.Closed, store.commit), lambda: refused(egmem.Closed, lambda: store.pages))
""",
    "a closed tier": """
tier = egmem.kv.Tier(pages=1, page_bytes=4096, driver=driver)
tier.close()
both(lambda: refused(egmem.Closed, tier.stats), lambda: tier.closed)
""",
    "a store with views": """
store = egmem.kv.Tier(pages=1, page_bytes=4096, driver=driver).prepare_store([b"key"])
view = store.view(0)
both(lambda: refused(egmem.InUse, store.commit), lambda: store.pages)
""",
}


@pytest.mark.parametrize("case", PAIRS)
def test_errors_are_raised_without_a_lock(case):
    """An exception's class is Python's: the interpreter may switch threads while one is made."""
    run(BOTH + PAIRS[case])


def test_a_commit_beside_other_calls_of_its_store():
    run(
        BOTH
        + """
tier = egmem.kv.Tier(pages=64, page_bytes=4096, driver=driver)
numbers = iter(range(10**9))
stores = [tier.prepare_store([next(numbers).to_bytes(8, "little")])]

def commit():
    store = tier.prepare_store([next(numbers).to_bytes(8, "little")])
    stores[0] = store
    store.commit()

def read():
    store = stores[0]
    assert len(store.pages) == len(store.indices) == 1 and len(store.evicted) <= 1

both(commit, read, read)
"""
    )


class Copy:
    """A copy of 256 MiB into a GPU's cache, which the simulator does when it is waited for."""

    PAGE = 64 << 20
    PAGES = 4

    def __init__(self, driver):
        tier = egmem.kv.Tier(pages=self.PAGES, page_bytes=self.PAGE, node=0, driver=driver)
        keys = [bytes([number]) for number in range(self.PAGES)]
        with tier.prepare_store(keys) as store:
            for number in range(self.PAGES):
                store.view(number).fill(7)
            store.commit()
        self.cache = egmem.Buffer(self.PAGES * self.PAGE, node=0, driver=driver)
        self.array = np.asarray(self.cache)
        gpu_pages = egmem.kv.GpuPages([self.cache.address], self.PAGE, self.PAGE, self.PAGES, keep=self.cache)
        with tier.prepare_load(keys) as load:
            self.job = tier.load(load.pages, range(self.PAGES), gpu_pages, stream=egmem.Stream(0, driver=driver))

    def is_whole(self):
        return bool((self.array[:: 1 << 20] == 7).all())


def beside_wait(job, function):
    """Calls `function` while another thread waits for a job, until that has ended; returns its result."""
    waiter = threading.Thread(target=job.wait)
    waiter.start()
    time.sleep(0.005)
    answers = []
    while waiter.is_alive():
        answers.append(function())
    waiter.join()
    return answers


def test_a_job_is_not_done_while_another_thread_waits_for_it(driver):
    copy = Copy(driver)
    assert not copy.array.any()
    answers = beside_wait(copy.job, lambda: (copy.job.is_done(), copy.is_whole()))
    assert (True, False) not in answers
    assert copy.job.is_done() and copy.is_whole() and "ended" in repr(copy.job)


def test_two_threads_wait_for_a_job(driver):
    copy = Copy(driver)

    def wait():
        copy.job.wait()
        return copy.is_whole()

    assert all(beside_wait(copy.job, wait))
    copy.job.wait()


def test_a_failure_is_raised_each_time(driver):
    tier = egmem.kv.Tier(pages=1, page_bytes=4096, node=0, driver=driver)
    with tier.prepare_store([b"key"]) as store:
        store.commit()
    others = egmem.kv.Tier(pages=1, page_bytes=4096, node=0, driver=driver)
    gpu_pages = egmem.kv.GpuPages([others.page_address(0)], 4096, 4096, 1)
    with tier.prepare_load([b"key"]) as load:
        job = tier.load(load.pages, [0], gpu_pages, stream=egmem.Stream(0, driver=driver))
    others.close()  # too early: the GPU finds no memory there, and its context is lost
    for call in (job.wait, job.is_done, job.wait, job.is_done):
        with pytest.raises(egmem.ContextLost):
            call()
    assert "ended" in repr(job)


def runs_beside(function):
    """Returns whether another thread runs Python code during a call. The interpreter takes the GIL from no thread meanwhile.

    On a busy machine the other thread may have no core during a call that waits without the GIL: tests try several times.
    """
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    thread.start()
    while not counted[0]:
        time.sleep(0.001)
    sys.setswitchinterval(1000)
    try:
        before = counted[0]
        function()
        return counted[0] > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_growth_releases_the_gil(driver):
    heap = egmem.Heap(0, limit=8 << 30, driver=driver)

    def grow():
        heap.reserve(4 << 30)

    def turn():
        heap.trim()
        return runs_beside(grow)

    assert any(turn() for _ in range(1000))


def view(buffer):
    return buffer.on("cpu")


def capsule(buffer):
    return buffer.__dlpack__()


def versioned_capsule(buffer):
    return buffer.__dlpack__(max_version=(1, 0))


@pytest.mark.parametrize("share", [view, capsule, versioned_capsule, memoryview, np.asarray, np.from_dlpack])
def test_the_last_share_waits_without_the_gil(share, driver):
    """The end of memory whose address was given away waits for the GPUs, whose work may need the GIL."""

    def turn():
        buffer = egmem.Buffer(64 << 20, node=0, driver=driver)
        buffer.fill(1)
        kept = [share(buffer)]
        assert buffer.address
        del buffer
        copy = Copy(driver)
        assert not copy.is_whole()
        beside = runs_beside(kept.clear)
        assert copy.is_whole(), "the end waits for the copy"
        return beside

    assert any(turn() for _ in range(100))


@pytest.mark.parametrize("share", [memoryview, np.asarray])
def test_the_end_of_a_view_waits_for_copies(share, driver):
    """The buffer protocol gives the address away: without a wait, the copy would use freed memory."""
    cache = share(egmem.Buffer(4096, node=0, driver=driver))
    address = np.asarray(cache).ctypes.data
    tier = egmem.kv.Tier(pages=1, page_bytes=4096, node=0, driver=driver)
    with tier.prepare_store([b"key"]) as store:
        store.commit()
    with tier.prepare_load([b"key"]) as load:
        job = tier.load(load.pages, [0], egmem.kv.GpuPages([address], 4096, 4096, 1), stream=egmem.Stream(0, driver=driver))
    del cache
    job.wait()


def test_reading_and_writing_give_no_address_away(driver):
    copy = Copy(driver)
    buffer = egmem.Buffer(4096, node=0, driver=driver)
    buffer.write(b"bytes", 1)
    assert buffer.read(0, 7) == b"\0bytes\0"
    buffer.close()
    assert not copy.is_whole(), "nothing waited"
