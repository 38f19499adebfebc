"""Exit, fork and spawn, each in processes of their own."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(code, *arguments, **environment):
    ended = subprocess.run(
        # From Python 3.12 on, os.fork() warns of threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "EGMEM_SIM": "gh200", **environment},
    )
    assert ended.returncode == 0, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    assert ended.stderr == ""
    return ended.stdout


def test_an_exit_with_live_objects_is_clean():
    run(
        """
        import numpy, egmem, threading, time
        buffer = egmem.Buffer(1 << 20)
        view = memoryview(buffer)
        array = numpy.from_dlpack(buffer)
        heap = egmem.Heap(0, grow_ahead=64 << 20)
        block = heap.allocate(1000)
        later = heap.allocate(1000)
        stream = egmem.Stream(0)
        later.free_after(stream)
        pool = egmem.Pool(0)
        of_pool = pool.allocate(1000)
        capsule = buffer.__dlpack__()
        cycle = [egmem.Buffer(1)]; cycle.append(cycle)
        class AtExit:
            def __del__(self):
                buffer.read(0, 1)
        atexit = AtExit()
        """
    )


def test_an_exit_with_daemon_threads_in_calls_is_clean():
    run(
        """
        import egmem, threading, time
        heap = egmem.Heap(0, limit=4 << 30)
        def work():
            while True:
                heap.reserve(1 << 30); heap.trim()
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        """
    )


def test_an_exit_with_daemon_threads_in_the_packages_own_code_is_clean():
    run(
        """
        import egmem, threading, time
        buffer = egmem.Buffer(1 << 20)
        def work():
            while True:
                buffer.view("f4"), egmem.topology().gpus, egmem.allocations(), egmem.locate(buffer)
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        """
    )


@pytest.mark.parametrize(
    "call",
    [
        "tier.lookup(slow(bytes([number])) for number in range(100))",
        "heap.allocate_many(slow(number) for number in range(1, 100))",
        "warned()",
        "tier.on_event(failing); store()",
    ],
)
def test_an_exit_with_daemon_threads_in_the_programs_own_code_is_clean(call):
    run(
        f"""
        import egmem.kv, itertools, sys, threading, time, warnings
        tier = egmem.kv.Tier(pages=10, page_bytes=4096)
        heap = egmem.Heap(0)

        def slow(value, *more, **named):
            time.sleep(0.001)
            return value

        sys.unraisablehook = slow
        warnings.simplefilter("always")
        warnings.showwarning = slow
        numbers = itertools.count()

        def failing(event):
            raise ValueError

        def warned():
            tier.prepare_store([b"%d" % next(numbers)])

        def store():
            with tier.prepare_store([b"%d" % next(numbers)]) as store:
                store.commit()

        def work():
            while True:
                {call}

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        """
    )


def test_a_second_interpreter_of_the_process_is_refused():
    pytest.importorskip("_xxsubinterpreters")
    out = run(
        """
        import _xxsubinterpreters, egmem
        code = "try:\\n    import egmem\\nexcept ImportError as error:\\n    print('refused:', error, flush=True)"
        _xxsubinterpreters.run_string(_xxsubinterpreters.create(), code)
        # It stays: the end of the program ends it.
        """
    )
    assert out.startswith("refused:") and "interpreter" in out


def test_exit_while_daemon_threads_run_functions_of_the_program():
    run(
        """
        import os, threading, time, egmem, egmem.kv
        tier = egmem.kv.Tier(pages=100, page_bytes=4096)
        called = [threading.Event() for _ in range(2)]

        def told(event):
            called[0].set()
            time.sleep(0.001)

        def progress(done, total):
            called[1].set()
            time.sleep(0.001)

        def store():
            while True:
                with tier.prepare_store([os.urandom(8)]) as store:
                    store.commit()

        def reserve():
            heap = egmem.Heap(0, limit="256MiB")
            while True:
                heap.reserve("256MiB", progress=progress)
                heap.trim()

        subscription = tier.on_event(told)
        for work in (store, store, reserve, reserve):
            threading.Thread(target=work, daemon=True).start()
        for event in called:
            event.wait()
        """
    )


def test_a_function_of_the_program_that_runs_at_the_exit_may_call_egmem():
    program = """
import os, threading, time, egmem, egmem.kv
tier = egmem.kv.Tier(pages=100, page_bytes=4096)
called = threading.Event()

def told(event):
    called.set()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        try:
            egmem.Buffer(1, node=99)
        except egmem.NoSuchPlace:
            pass
    os.write(1, b"returned")

def store():
    with tier.prepare_store([b"key"]) as store:
        store.commit()

subscription = tier.on_event(told)
threading.Thread(target=store, daemon=True).start()
called.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "EGMEM_SIM": "gh200"})
    assert (ended.returncode, ended.stdout) == (0, "returned"), ended.stderr


def test_a_forked_child_is_refused():
    out = run(
        """
        import os, pickle, egmem
        buffer = egmem.Buffer(1 << 20)
        heap = egmem.Heap(0)
        block = heap.allocate(100)
        pool = egmem.Pool(0)
        stream = egmem.Stream(0)
        driver = egmem.default_driver()
        event, shared = egmem.Event(), egmem.Event(interprocess=True)
        producer, consumer = egmem.ring(8)
        view = buffer.view()
        calls = [
            lambda: stream.wait(event), lambda: event.record(stream), event.is_done, event.synchronize, shared.ipc_handle,
            lambda: view.ready_on(stream), lambda: pickle.dumps(shared), lambda: pickle.dumps(producer),
            lambda: egmem.Buffer(1), lambda: heap.allocate(1), lambda: memoryview(buffer), lambda: buffer.read(), buffer.close,
            lambda: block.free_after(stream), lambda: pool.allocate(1), stream.synchronize, driver.topology, heap.stats,
            lambda: buffer.__dlpack__(), lambda: buffer.__array_interface__, lambda: buffer.fill(1), heap.trim,
        ]
        child = os.fork()
        if child == 0:
            refused = 0
            for call in calls:
                try:
                    call()
                except egmem.InvalidArgument as error:
                    refused += "forked child" in str(error)
            assert "GPUs unknown" in repr(driver), repr(driver)
            print(refused, len(calls), flush=True)
            del buffer, heap, block, pool, stream
            raise SystemExit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        buffer.fill(1)
        heap.allocate(1)
        """
    )
    refused, count = out.split()
    assert refused == count


def test_a_fork_while_a_driver_opens(tmp_path):
    description = tmp_path / "machine.json"
    os.mkfifo(description)  # opening the driver waits until the description is written
    run(
        """
        import os, threading, time, egmem
        refused = []
        def open_driver():
            try:
                egmem.Buffer(1)
            except egmem.InvalidArgument as error:
                refused.append(error)
        opening = threading.Thread(target=open_driver, daemon=True)
        opening.start()
        description = None
        while description is None:
            try:  # fails until the thread has opened the description to read it
                description = os.open(os.environ["EGMEM_SIM"], os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                time.sleep(0.001)
        child = os.fork()
        if child == 0:
            try:
                egmem.Buffer(1)
            except egmem.InvalidArgument as error:
                os._exit(0 if "forked child" in str(error) else 1)
            os._exit(2)
        for _ in range(3000):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            raise AssertionError("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0, status
        os.write(description, b"no description")
        os.close(description)
        opening.join()
        assert refused
        """,
        EGMEM_SIM=str(description),
    )


def test_a_child_of_a_process_without_a_driver_opens_one():
    run(
        """
        import os, egmem
        egmem.set_default_driver(None)
        child = os.fork()
        if child == 0:
            own = egmem.Buffer(100)
            own.write(b"own")
            os._exit(own.read(0, 3) != b"own")
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_a_forked_child_does_not_warn_of_its_parent_s_store():
    run(
        """
        import os, warnings, egmem.kv
        tier = egmem.kv.Tier(pages=1, page_bytes=4096)
        store = tier.prepare_store([b"key"])
        warnings.filterwarnings("always", category=ResourceWarning)
        child = os.fork()
        if child == 0:
            del store
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        store.commit()
        """
    )


def test_a_forked_child_may_open_its_own_simulated_driver():
    run(
        """
        import os, egmem
        buffer = egmem.Buffer(1 << 20)
        child = os.fork()
        if child == 0:
            own = egmem.Buffer(100, driver=egmem.simulated())
            own.write(b"own")
            os._exit(own.read(0, 3) != b"own")
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_spawned_processes_have_their_own(tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, egmem

            def work(number):
                buffer = egmem.Buffer(10)
                buffer.fill(number)
                return buffer.read()

            if __name__ == "__main__":
                kept = egmem.Buffer(1)
                with multiprocessing.get_context("spawn").Pool(2) as pool:
                    assert pool.map(work, [1, 2]) == [b"\\1" * 10, b"\\2" * 10]
            """
        )
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "EGMEM_SIM": "gh200"}
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("module", ["torch", "cupy", "rmm"])
def test_modules_for_missing_libraries_say_so(module):
    try:
        __import__(module)
    except ImportError:
        with pytest.raises(ImportError, match=module):
            __import__(f"egmem.{module}")
    else:
        __import__(f"egmem.{module}")
