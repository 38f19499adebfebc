"""Mistakes: each raises an exception of the right class, whose text and remedy are Python's. The rows are in mistakes.py."""

import re
import subprocess
import sys

import numpy
import pytest
from conftest import CONFIG, serving
from mistakes import OF_SERVERS, ROWS

import egmem
import egmem.kv
import egmem.numpy

# Words that are not Python's: of Rust, of C, options of the command line outside a command.
FOREIGN = re.compile(
    r"\w::\w|\(true\)|HeapOptions|[A-Za-z]+Options\b|\begm_\w+|\bEGM_\w+|\begmem\._\w+|\busize\b|\bu64\b|\bVec\b"
    r"|(?<!egmem certs issue )--[a-z]"
)


class Things(dict):
    """The objects that the rows use: each is made when a row names it."""

    def __init__(self, address=None):
        super().__init__(egmem=egmem, kv=egmem.kv, numpy=numpy)
        self.address = address
        self.kept = []

    def __missing__(self, name):
        make = getattr(self, f"make_{name}", None)
        if make is None:
            raise KeyError(name)
        self[name] = made = make()
        return made

    def keep(self, *values):
        self.kept.extend(values)

    def memory(self, nbytes=4096, **options):
        return egmem.Buffer(nbytes, node=options.pop("node", 0), driver=self["driver"], **options)

    def ended(self, thing):
        thing.close()
        return thing

    def make_driver(self):
        return egmem.simulated("gh200x4")

    def make_topology(self):
        return egmem.topology(self["driver"])

    def make_stream(self):
        return egmem.Stream(0, driver=self["driver"])

    def make_other_stream(self):
        return egmem.Stream(0, driver=egmem.simulated("gh200"))

    def make_buffer(self):
        return self.memory()

    def make_closed(self):
        return self.ended(self.memory())

    def make_garbage(self):
        memory = self.memory(1 << 20)
        memory.fill(7)
        return memory

    def make_gpu_only(self):
        return self.memory(host="")

    def make_of_gpu(self):
        return self.memory(node=None, device=0, host="")

    def make_read_only(self):
        return self.memory(host="r")

    def make_with_view(self):
        memory = self.memory()
        self.keep(memoryview(memory))
        return memory

    def make_with_array(self):
        memory = self.memory()
        self.keep(numpy.frombuffer(memory, "f4"))
        return memory

    def make_with_interface(self):
        memory = self.memory()
        memory.__array_interface__
        return memory

    def make_heap(self):
        return egmem.Heap(0, limit=64 << 20, driver=self["driver"])

    def make_full_heap(self):
        heap = egmem.Heap(0, limit=4 << 20, chunk=2 << 20, driver=self["driver"])
        self.keep(heap.allocate(2 << 20), heap.allocate(2 << 20))
        return heap

    def make_closed_heap(self):
        return self.ended(egmem.Heap(0, driver=self["driver"]))

    def make_block(self):
        return self["heap"].allocate(1000)

    def make_freed_block(self):
        return self.ended(self["heap"].allocate(10))

    def make_block_with_view(self):
        block = self["heap"].allocate(10)
        self.keep(memoryview(block))
        return block

    def make_pool(self):
        return egmem.Pool(0, driver=self["driver"])

    def make_closed_pool(self):
        return self.ended(egmem.Pool(0, driver=self["driver"]))

    def make_pool_block(self):
        return self["pool"].allocate(100, self["stream"])

    def make_freed_pool_block(self):
        block = self["pool"].allocate(100, self["stream"])
        block.free_after(self["stream"])
        return block

    def make_client(self):
        return egmem.connect(self.address, driver=egmem.simulated("gh200"))

    def make_closed_client(self):
        return self.ended(egmem.connect(self.address, driver=egmem.simulated("gh200")))

    def make_own(self):
        """The prefix of this user's names, with a memory `held` that has a lease."""
        own = self["client"].peer_name + "/"
        self["client"].create(own + "held", 4096, exist_ok=True)
        self.keep(self["client"].fetch(own + "held"))
        return own

    def make_remote(self):
        return self["client"].fetch(self["own"] + "held", mode="r")

    def make_released(self):
        memory = self["client"].fetch(self["own"] + "held")
        memory.release()
        return memory

    def make_tier(self):
        return egmem.kv.Tier(8, 4096, node=0, driver=self["driver"])

    def make_closed_tier(self):
        return self.ended(egmem.kv.Tier(8, 4096, node=0, driver=self["driver"]))

    def make_used_tier(self):
        """Memory in which a tier lives."""
        memory = self.memory(1 << 20)
        address = memory.address
        self.keep(egmem.kv.Tier.attach(memory, pages=8, page_bytes=4096), address)
        return memory

    def make_load(self):
        with self["tier"].prepare_store([b"there"]) as store:
            store.commit()
        return self["tier"].prepare_load([b"there"])

    def make_released_load(self):
        load = self["load"]
        load.release()
        return load

    def make_store(self):
        return self["tier"].prepare_store([b"new"])

    def make_closed_store(self):
        return self.ended(self["tier"].prepare_store([b"new"]))

    def make_store_with_view(self):
        store = self["tier"].prepare_store([b"new"])
        self.keep(memoryview(store.view(0)))
        return store

    def make_gpu_pages(self):
        cache = egmem.Buffer(8 * 4096, device=0, driver=self["driver"])
        return egmem.kv.GpuPages([cache.address], 4096, 4096, 8, keep=cache)

    def make_larger_pages(self):
        cache = egmem.Buffer(8 * 4096, device=0, driver=self["driver"])
        return egmem.kv.GpuPages([cache.address], 8192, 8192, 4, keep=cache)


    def make_doomed(self):
        """A name of a memory that is held."""
        name = self["client"].peer_name + "/doomed"
        self["client"].create(name, 4096)
        self.keep(self["client"].fetch(name))
        return name

    def end(self):
        """Gives back what a server would wait for."""
        self.kept.clear()
        for name in {"remote", "client"} & self.keys():
            self.pop(name).close()


@pytest.fixture(scope="module")
def names_server(tmp_path_factory):
    """A server where a peer creates names below its own."""
    settings = CONFIG.partition("[[create.prefix]]")[0]
    with serving(tmp_path_factory.mktemp("server"), settings) as address:
        yield address


def check(row, things):
    expression, kind, message, remedy = row
    with pytest.raises(BaseException) as caught:
        eval(expression, {}, things)
    error = caught.value
    said, advised = getattr(error, "message", str(error)), getattr(error, "remedy", "")
    notes = " ".join(getattr(error, "__notes__", []))
    shown = f"{type(error).__name__}: {said} -> {advised}"
    assert type(error).__name__ == kind, shown
    assert type(error).__module__ in ("egmem", "builtins"), type(error).__module__
    assert message in f"{said} {notes}", shown
    assert remedy in advised if remedy else not advised, shown
    assert not FOREIGN.search(f"{said} {advised}"), shown


def named(rows):
    return [pytest.param(row, id=row[0]) for row in rows]


@pytest.mark.parametrize("row", named(ROWS))
def test_a_mistake_is_explained(row):
    check(row, Things())


@pytest.mark.parametrize("row", named(OF_SERVERS))
def test_a_mistake_at_a_server_is_explained(row, names_server):
    things = Things(names_server)
    try:
        check(row, things)
    finally:
        things.end()


def test_each_row_is_there_once():
    expressions = [row[0] for row in ROWS + OF_SERVERS]
    assert len(expressions) == len(set(expressions)) >= 168


def test_tracebacks_name_the_package():
    """The module of the classes is the one that programs import them from."""
    program = "import egmem; egmem.simulated('gh200').topology().gpu(7)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "\negmem.NoSuchPlace: there is no GPU 7" in ended.stderr, ended.stderr
    for name in egmem.__all__:
        thing = getattr(egmem, name)
        if isinstance(thing, type) and issubclass(thing, BaseException):
            assert thing.__module__ == "egmem" and getattr(egmem, thing.__name__) is thing
