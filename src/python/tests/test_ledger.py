"""Whose memory it is: the lines of Python that allocated, `allocations`, `locate`, `memory_summary`, `ps`."""

import os
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

import egmem
import egmem.kv
import egmem.numpy

MIB = 1 << 20
HERE = os.path.abspath(__file__)


def line_of(make):
    """Calls ``make``, which is one line; returns its result and the line."""
    return make(), make.__code__.co_firstlineno


def only(driver, label):
    [entry] = [entry for entry in egmem.allocations(driver) if entry.label == label]
    return entry


def test_each_kind_of_memory_has_the_program_s_line(driver):
    heap, at_heap = line_of(lambda: egmem.Heap(0, chunk=2 * MIB, label="heap", driver=driver))
    pool = egmem.Pool(0, label="pool", driver=driver)
    kept = []
    for label, kind, make in (
        ("buffer", "vmm", lambda: egmem.Buffer(10, node=0, label="buffer", driver=driver)),
        ("pool", "pool", lambda: pool.allocate(10)),
        ("tier", "vmm", lambda: egmem.kv.Tier(pages=4, page_bytes=64, node=0, label="tier", driver=driver)),
    ):
        memory, line = line_of(make)
        entry = only(driver, label)
        assert (entry.kind, entry.file, entry.line, entry.function) == (kind, HERE, line, "<lambda>")
        assert entry.node == 0 and entry.nbytes >= 10 and entry.age >= 0 and entry.stack is None
        assert f"{HERE}:{line}" in repr(entry) and entry.to_dict()["site"]["line"] == line
        kept.append(memory)
    # Chunks that other calls and other threads add have the line of the heap.
    blocks = [heap.allocate(MIB) for _ in range(3)]
    thread = threading.Thread(target=lambda: blocks.append(heap.allocate(2 * MIB)))
    thread.start()
    thread.join()
    chunks = [entry for entry in egmem.allocations(driver) if entry.label == "heap"]
    assert len(chunks) > 1
    assert {(chunk.kind, chunk.file, chunk.line) for chunk in chunks} == {("heap chunk", HERE, at_heap)}
    del memory, kept, blocks


def test_frames_of_the_package_are_skipped(driver):
    egmem.set_default_driver(driver)
    heap = egmem.Heap(1, label="arrays", driver=driver)
    array, line = line_of(lambda: egmem.numpy.empty((10,), "float32", heap=heap))
    assert only(driver, "arrays").file == HERE
    # A module of a name that only begins like this one is the program's.
    names = {"__name__": "egmem_tools", "egmem": egmem, "driver": driver}
    exec(compile("buffer = egmem.Buffer(1, node=0, label='tools', driver=driver)", "tools.py", "exec"), names)
    assert (only(driver, "tools").file, only(driver, "tools").function) == ("tools.py", "<module>")
    names = {"__name__": "egmem.tools", "egmem": egmem, "driver": driver}
    exec(compile("def make():\n    return egmem.Buffer(1, node=0, label='own', driver=driver)", "own.py", "exec"), names)
    buffer, line = line_of(lambda: names["make"]())
    assert (only(driver, "own").file, only(driver, "own").line) == (HERE, line)
    del array, buffer


def test_a_path_that_is_no_unicode_is_escaped(driver):
    names = {"__name__": "script", "egmem": egmem, "driver": driver}
    exec(compile("buffer = egmem.Buffer(1, node=0, label='path', driver=driver)", "caf\udce9.py", "exec"), names)
    assert only(driver, "path").file == "caf\\udce9.py"


def test_an_allocation_late_in_the_shutdown_has_no_line():
    """An object in ``builtins`` ends after the modules."""
    program = """
import builtins, os
import egmem

class Late:
    def __init__(self):
        self.make, self.write, self.driver = egmem.Buffer, os.write, egmem.simulated("gh200")

    def __del__(self):
        self.write(1, str(self.make(1, node=0, driver=self.driver).nbytes > 0).encode())

builtins.late = Late()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True", "")


def test_a_thread_without_frames_of_the_program_has_no_line(driver):
    names = {"__name__": "egmem.tools", "egmem": egmem, "driver": driver, "kept": []}
    exec("def run():\n    kept.append(egmem.Buffer(1, node=0, label='none', driver=driver))", names)
    import _thread

    done = _thread.allocate_lock()
    done.acquire()
    names["done"] = done
    exec("def run_alone():\n    run()\n    done.release()", names)
    _thread.start_new_thread(names["run_alone"], ())
    done.acquire()
    entry = only(driver, "none")
    assert (entry.file, entry.line, entry.function, entry.stack) == (None, None, None, None)
    assert "allocated at" not in repr(entry)


def test_fetched_memory_has_the_line_that_fetched_it(server, driver):
    client = egmem.connect(server, driver=egmem.simulated("gh200"))
    client.create("lines", 2 * MIB)
    memory, line = line_of(lambda: client.fetch("lines", probe=False))
    entries = [entry for entry in egmem.allocations(memory.driver) if entry.label == "lines"]
    assert {(entry.kind, entry.file, entry.line) for entry in entries} == {("import", HERE, line)}, entries
    memory.close()
    client.delete("lines")


def test_locate(driver):
    buffer = egmem.Buffer(4 * MIB, node=2, label="weights", driver=driver)
    array = np.asarray(buffer.view("float32"))
    for memory, offset in (
        (buffer, 0),
        (buffer.address + 5, 5),
        (np.uint64(buffer.address + 6), 6),
        (buffer.view("float32", offset=64), 64),
        (array[1000:], 4000),
        (Tensor(buffer.address + 7), 7),
    ):
        found = egmem.locate(memory)
        assert (found.offset, found.location, found.nbytes) == (offset, "host NUMA node 2", 4 * MIB)
        assert found.allocation.label == "weights" and f"offset {offset} of <egmem.Allocation" in repr(found)
    assert egmem.locate(buffer, egmem.simulated("gh200")) is None
    assert egmem.locate(np.zeros(10), driver) is None
    for wrong in ("text", object(), 1.5):
        with pytest.raises(TypeError, match="no address"):
            egmem.locate(wrong)
    address = buffer.address
    del array, found, memory
    buffer.close()
    assert egmem.locate(address, driver) is None
    with pytest.raises(egmem.Closed):
        egmem.locate(buffer)


class Tensor:
    """What PyTorch's tensors have."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


class OneNumber:
    """As an array of PyTorch or CuPy with one integer, which is an index too."""

    def __init__(self, address):
        self.__cuda_array_interface__ = {"data": (address, False)}

    def __index__(self):
        return 5

    def __setitem__(self, index, value):
        raise NotImplementedError


def test_locate_takes_an_array_of_one_number_for_an_array(driver):
    buffer = egmem.Buffer(4096, driver=driver, label="number")
    for array in (np.asarray(buffer[56:64]).view("i8").reshape(()), OneNumber(buffer.address + 56)):
        found = egmem.locate(array, driver)
        assert found.offset == 56 and found.allocation.label == "number"
    assert egmem.locate(np.uint64(buffer.address + 56), driver).offset == 56


@pytest.mark.parametrize("address", [-1, 1 << 64])
def test_locate_refuses_a_number_that_is_no_address(address):
    with pytest.raises(egmem.InvalidArgument, match=rf"address is {address}; valid: 0 to 2\*\*64 - 1"):
        egmem.locate(address)


def test_locate_does_not_give_the_address_away(driver):
    """Otherwise freeing would wait for all GPUs."""
    buffer = egmem.Buffer(1, node=0, driver=driver)
    egmem.locate(buffer)
    egmem._egmem._fail(driver, "cuCtxSynchronize", 700)
    buffer.close()


def test_the_summary_is_this_process_s(driver):
    buffers = [egmem.Buffer(2 * MIB, node=0, label="batches", driver=driver) for _ in range(3)]
    text = egmem.memory_summary(driver)
    assert f"process {os.getpid()} (" in text and "3 allocations" in text
    assert "batches" in text and "6 MiB" in text and "test_ledger.py" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "batches" in egmem.memory_summary()
    del buffers
    assert "0 allocations" in egmem.memory_summary(driver)


def test_ps_has_this_process(driver):
    buffer = egmem.Buffer(2 * MIB, node=0, label="shown", driver=driver)
    text = egmem.ps(driver)
    assert f"process {os.getpid()} (" in text and "shown" in text
    assert f"{HERE}:" in egmem.ps(driver, wide=True) and hex(buffer.address) in egmem.ps(driver, wide=True)
    [own] = [found for found in egmem.ps_dict(driver)["processes"] if found["process"]["pid"] == os.getpid()]
    assert "shown" in [entry["label"] for entry in own["allocations"]]


PROGRAM = """
import ctypes, os
import egmem

driver = egmem.simulated("gh200")

def load():
    return egmem.Buffer(1, node=0, label="kept", driver=driver)

kept = load()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
own = f"process {os.getpid()} ("
print(sum(line.startswith(own) for line in egmem.ps(driver).splitlines()))
"""


def run(tmp_path, **environment):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **environment}
    arguments = [sys.executable, "train.py", "--epochs", "3"]
    environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(egmem.__file__))
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    return path, ended


def test_leaks_name_the_line_and_the_command(tmp_path):
    path, ended = run(tmp_path, EGMEM_LEAKS="1")
    assert "still allocated at exit: 1 allocation, 2 MiB" in ended.stderr
    assert "train.py --epochs 3): 1 allocation" in ended.stderr
    assert "train.py:8" in ended.stderr and "kept" in ended.stderr
    assert ".rs" not in ended.stderr


def test_leaks_have_the_python_stack(tmp_path):
    path, ended = run(tmp_path, EGMEM_LEAKS="1", EGMEM_BACKTRACES="1")
    assert f'File "{path}", line 8, in load' in ended.stderr
    assert f'File "{path}", line 10, in <module>' in ended.stderr
    assert ".rs" not in ended.stderr


def test_a_process_that_offers_its_ledger_is_shown_once(tmp_path):
    _, ended = run(tmp_path, EGMEM_PS="1")
    assert ended.stdout == "1\n"


def test_the_guide_s_examples_run(capsys):
    page = pathlib.Path(__file__).resolve().parents[3] / "docs/ledger.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    names = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "guide.py", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(blocks) == 2 and printed[0] == "guide.py 4"
    assert any(line.endswith("weights guide.py:4") for line in printed[1:])
