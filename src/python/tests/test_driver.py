"""Drivers, the default one, topology, exceptions."""

import json
import subprocess
import sys

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
        self.write, self.error, self.name = os.write, Exception, type
        self.calls = [
            lambda: tier(pages=4, page_bytes=4096, driver=driver),
            lambda: tier(bytes="16MiB", page_bytes=[4096, 8192], driver=driver).lookup([b"a"], group=[1]),
            lambda: tier(pages=0, page_bytes=4096, driver=driver),
            lambda: receive("/no-such/socket", driver=driver, timeout=0.01),
        ]

    def __del__(self):
        for call in self.calls:
            try:
                call()
                self.write(1, b"done,")
            except self.error as error:
                self.write(1, self.name(error).__name__.encode() + b",")

builtins.late = Late()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done,done,RuntimeError,RuntimeError,", "")
