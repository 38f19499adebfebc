"""Drivers, the default one, topology, exceptions."""

import gc
import json
import pickle
import subprocess
import sys
import weakref

import pytest

import egmem


def test_a_simulated_driver_says_so(driver):
    assert driver.is_simulated and driver.name == "simulated" and driver.gpu_count == 4
    assert "SIMULATED" in repr(driver)
    assert driver == driver.topology() or driver == egmem.Buffer(1, driver=driver).driver
    assert driver != egmem.simulated("gh200x4")


def test_presets_and_descriptions(tmp_path):
    with pytest.raises(egmem.InvalidArgument, match="gh200"):
        egmem.simulated("no-such-machine")
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(egmem.InvalidArgument, match="broken.json"):
        egmem.simulated(str(path))


def test_the_default_driver(monkeypatch, driver):
    monkeypatch.setenv("EGMEM_SIM", "gb200")
    first = egmem.default_driver()
    assert first.is_simulated and first.gpu_count == len(egmem.topology().gpus)
    assert egmem.default_driver() == first and egmem.Buffer(1).driver == first
    egmem.set_default_driver(driver)
    assert egmem.default_driver() == driver


def test_topology(driver):
    topology = driver.topology()
    assert [node.id for node in topology.nodes] == [0, 1, 2, 3]
    gpu = topology.gpu(2)
    assert (gpu.ordinal, gpu.host_node, gpu.link, gpu.coherent) == (2, 2, "NVLink-C2C", True)
    assert gpu.peers == [0, 1, 3] and gpu.compute_capability[0] >= 9
    node = topology.node(gpu.host_node)
    assert node.gpus == [2] and node.cpus[0] == 144 and node.distances[2] == 10
    free = topology.free_memory(1)
    buffer = egmem.Buffer(64 << 20, node=1, driver=driver)
    assert topology.free_memory(1) == free - (64 << 20)
    del buffer
    assert topology.to_dict()["gpus"][0]["ordinal"] == 0
    assert str(topology) == topology.to_text() and topology.to_svg().startswith("<svg")
    with pytest.raises(egmem.NoSuchPlace) as caught:
        topology.gpu(9)
    assert caught.value.remedy == "choose one that `egmem topo` lists"


def test_a_gpu_whose_node_is_unknown_raises_at_each_access(tmp_path):
    path = tmp_path / "machine.json"
    gpu = {"name": "GPU", "pci_bus_id": "0000:01:00.0", "memory": 1 << 30, "host_numa": -1}
    path.write_text(json.dumps({"name": "one", "nodes": [{"id": 0, "memory": 1 << 30}], "gpus": [gpu]}))
    found = egmem.simulated(str(path)).topology().gpu(0)
    for _ in range(2):
        with pytest.raises(egmem.NoSuchPlace, match="node of GPU 0 is unknown") as caught:
            found.host_node
        assert len(caught.traceback) == 2, "each has a traceback of its own"

    class Kept:
        pass

    def ask():
        kept = Kept()
        try:
            found.host_node
        except egmem.NoSuchPlace:
            return weakref.ref(kept)

    gc.disable()
    try:
        assert ask()() is None, "the GPU keeps no frame"
    finally:
        gc.enable()
    with pytest.raises(AttributeError):
        found.name = "another"


def test_exceptions_have_pythons_classes_and_a_remedy(driver):
    with pytest.raises(ValueError) as caught:
        egmem.Buffer(0, driver=driver)
    assert isinstance(caught.value, egmem.InvalidArgument) and "1 byte or more" in str(caught.value)
    heap = egmem.Heap(0, limit=2 << 20, driver=driver)
    with pytest.raises(MemoryError) as caught:
        heap.allocate(4 << 20)
    assert isinstance(caught.value, egmem.OutOfMemory)
    with pytest.raises(egmem.OutOfMemory):
        egmem.Buffer(1 << 50, node=0, driver=driver)
    with pytest.raises(egmem.NoSuchPlace) as caught:
        egmem.Buffer(1, node=17, driver=driver)
    assert caught.value.remedy and str(caught.value) == f"{caught.value.message}; what to do: {caught.value.remedy}"


def test_without_a_driver_opening_is_typed():
    code = (
        "import egmem\n"
        "try:\n"
        "    egmem.open()\n"
        "    print('opened')\n"
        "except egmem.NoDriver as error:\n"
        "    print('no driver', bool(error.remedy))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() in ("opened", "no driver True")


def test_values_are_json(driver):
    json.dumps(driver.topology().to_dict())


def test_calls_late_in_the_shutdown_return_or_raise():
    """An object in ``builtins`` ends after the modules, when no class of errors can be imported and no thread attaches."""
    program = """
import builtins, os
import egmem, egmem.kv

class Late:
    def __init__(self):
        driver, tier, receive = egmem.simulated("gh200"), egmem.kv.Tier, egmem.receive
        gather, buffer, heap = egmem._egmem._gather, egmem.Buffer, egmem.Heap(driver=driver)
        self.write, self.error, self.name, self.text = os.write, Exception, type, str
        self.calls = [
            lambda: tier(pages=4, page_bytes=4096, driver=driver),
            lambda: tier(bytes="16MiB", page_bytes=[4096, 8192], driver=driver).lookup([b"a"], group=[1]),
            lambda: tier(pages=4, page_bytes=4096, driver=driver).stats(),
            lambda: tier(pages=0, page_bytes=4096, driver=driver),
            lambda: buffer(1, node=17, driver=driver),
            lambda: buffer(driver, driver=driver),
            lambda: buffer(1, node="1", driver=driver),
            lambda: tier(pages=4, page_bytes=4096, driver=driver).lookup(b"a"),
            lambda: tier(pages=4, page_bytes=4096, driver=driver).lookup([1]),
            lambda: heap.allocate_many([64, 128]),
            lambda: heap.allocate_many(64),
            lambda: buffer(1, access_by=[0], driver=driver),
            lambda: buffer(1, label=1, driver=driver),
            lambda: buffer(1, shareable=1, driver="gh200"),
            lambda: tier(pages="4", page_bytes=4096, driver=driver),
            lambda: receive("/no-such/socket", driver=driver, timeout="1"),
            lambda: receive("/no-such/socket", driver=driver, timeout=0.01),
            lambda: gather(None, (0, 2, lambda own: [own, own]), None, driver, 1.0),
        ]

    def __del__(self):
        for call in self.calls:
            try:
                call()
                self.write(1, b"done\\n")
            except self.error as error:
                self.write(1, f"{self.name(error).__name__}: {self.text(error)}\\n".encode())

builtins.late = Late()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "done",
        "done",
        "done",
        "RuntimeError: invalid pages: 0 pages; valid: 1 to 1073741824",
        "RuntimeError: there is no host NUMA node 17; host nodes: 0; what to do: choose one that `egmem topo` lists",
        'TypeError: a size or offset is an integer or text such as "64MiB", not Driver',
        "TypeError: a node is an integer or an egmem.Node, not str",
        "TypeError: keys is bytes: pass a list of keys: [b'a']",
        "TypeError: key 0 is int, and a key is bytes: pass bytes(key)",
        "done",
        "TypeError: int where a list is needed: pass [64]",
        "done",
        "TypeError: 'int' object is not an instance of 'str'",
        "TypeError: 'int' object is not an instance of 'bool'",
        "TypeError: 'str' object cannot be interpreted as an integer",
        "TypeError: must be real number, not str",
        "RuntimeError: cannot connect to /no-such/socket: No such file or directory (os error 2); what to do: start the "
        "server, or correct the path: no socket is there",
        "RuntimeError: the ranks' all-gather: the interpreter ends; what to do: see the transport's own log; let all ranks call "
        "it equally often",
    ]


@pytest.mark.parametrize("kind", [egmem.TimedOut, egmem.ConnectionFailed])
def test_an_error_of_a_connection_has_no_number_of_the_system(kind):
    error = kind("it is late", "wait", 7)
    for error in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(error, OSError) and (error.errno, error.strerror, error.filename) == (None, None, None)
        assert (error.message, error.remedy, error.code) == ("it is late", "wait", 7)
        assert str(error) == "it is late; what to do: wait"


def test_only_a_missing_class_makes_another_error(driver, monkeypatch):
    errors = sys.modules["egmem._errors"]
    monkeypatch.delattr(errors, "NoSuchPlace")
    with pytest.raises(RuntimeError, match="no host NUMA node 17.*; what to do: "):
        egmem.Buffer(1, node=17, driver=driver)

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(errors, "__getattr__", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        egmem.Buffer(1, node=17, driver=driver)


def test_a_first_import_late_in_the_shutdown_starts_no_interpreter():
    program = """
import os

class Late:
    def __init__(self):
        self.own, self.os = self, os

    def __del__(self):
        try:
            import egmem
        except ImportError:
            pass
        self.os.write(1, b"late")

Late()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "late"), ended.stderr
