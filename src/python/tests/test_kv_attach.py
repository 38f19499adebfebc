"""Tiers in memory that outlives the process."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest

import egmem
import egmem.kv

PAGE = 4096


def key(number):
    return number.to_bytes(4, "little") * 9  # of 36 bytes, as vLLM's


def test_pages_survive_a_kill(server):
    """A process stores pages, is killed in the middle of another store, and the next one finds the committed pages."""
    code = """
        import sys, time, egmem, egmem.kv
        tier = egmem.kv.attach(
            sys.argv[1], "kv", pages=64, page_bytes=4096, create=True, tag=b"model", driver=egmem.simulated("gh200")
        )
        print(tier.found["is_new"], flush=True)
        for number in range(40):
            with tier.prepare_store([number.to_bytes(4, "little") * 9]) as store:
                store.view(0).fill(number)
                store.commit()
        tier.touch([(0).to_bytes(4, "little") * 9])
        store = tier.prepare_store([b"unfinished"])
        store.view(0).fill(99)
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), server]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert [engine.stdout.readline() for _ in range(2)] == ["True\n", "ready\n"]
        with egmem.kv.attach(server, "kv", tag=b"model", driver=egmem.simulated("gh200")) as beside:
            assert beside.lookup([key(number) for number in range(41)]) == 40
            assert [member.pid for member in beside.members()] == [engine.pid, os.getpid()]
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    driver = egmem.simulated("gh200")
    with pytest.raises(egmem.InvalidArgument, match="tag"):
        egmem.kv.attach(server, "kv", tag=b"other", driver=driver)
    tier = egmem.kv.attach(server, "kv", pages=64, page_bytes=PAGE, tag=b"model", driver=driver)
    assert tier.found == {"generation": 3, "ready": 40, "unfinished": 1, "damaged": 0, "is_new": False}
    assert (tier.pages, tier.page_bytes, tier.stats()["free"]) == (64, PAGE, 24)
    stored = [egmem.kv.Tier.stored_key(key(number)) for number in (1, 0)]
    assert [tier.keys()[0][0], tier.keys()[-1][0]] == stored, "the order of use was kept: 0 was touched"
    assert tier.lookup([key(number) for number in range(41)]) == 40
    assert tier.lookup([b"unfinished"]) == 0
    with tier.prepare_load([key(number) for number in range(40)]) as load:
        for number in range(40):
            assert load.view(number).read() == bytes([number]) * PAGE


def test_a_tier_in_a_buffer(driver):
    bytes_needed = egmem.kv.Tier.bytes_needed(10, PAGE)
    assert 10 * PAGE < bytes_needed <= 15 * PAGE, "the table takes five pages at most"
    buffer = egmem.Buffer(bytes_needed, node=2, driver=driver)
    view = memoryview(buffer)
    with pytest.raises(egmem.InUse):
        egmem.kv.Tier.attach(buffer, pages=10, page_bytes=PAGE)
    view.release()
    with pytest.raises(egmem.InvalidArgument, match="page_bytes|bytes of a page"):
        egmem.kv.Tier.attach(buffer)
    assert not buffer.closed, "a refused buffer stays open"
    tier = egmem.kv.Tier.attach(buffer, pages=10, page_bytes=PAGE)
    assert buffer.closed and tier.found["is_new"] and "node 2" in repr(tier)
    other = egmem.Buffer(bytes_needed, driver=driver)
    other.fill(0xA5)
    with pytest.raises(egmem.InvalidArgument):
        egmem.kv.Tier.attach(other, pages=10, page_bytes=PAGE)
    assert egmem.kv.Tier.attach(other, pages=10, page_bytes=PAGE, reset=True).stats()["free"] == 10
    with pytest.raises(egmem.InvalidArgument, match="Buffer"):
        egmem.kv.Tier.attach(egmem.Heap(0, driver=driver).allocate(1 << 20), page_bytes=PAGE)


JOINER = """
    import sys, egmem, egmem.kv
    memory = egmem.receive(sys.argv[1], timeout=60)
    print("received", flush=True)
    sys.stdin.readline()
    tier = egmem.kv.Tier.attach(memory, tag=b"model")
    assert memory.closed and tier.lookup([b"first"]) == 1
    with tier.prepare_load([b"first"]) as load:
        print(load.view(0).read(0, 5).decode(), tier.found["generation"], flush=True)
"""


@pytest.fixture
def simulated(monkeypatch):
    """The simulated machine of this process and of those that it starts."""
    monkeypatch.setenv("EGMEM_SIM", "gh200")


def shareable():
    return egmem.Buffer(egmem.kv.Tier.bytes_needed(10, PAGE), shareable=True)


def store(tier, key, contents):
    with tier.prepare_store([key]) as writing:
        writing.view(0).write(contents)
        writing.commit()


def test_another_process_attaches_received_memory(simulated, tmp_path):
    """Memory stays offered when a tier has taken it over, and the offer ends with the tier."""
    path, buffer = tmp_path / "socket", shareable()
    offer = buffer.share(path)
    with egmem.kv.Tier.attach(buffer, page_bytes=PAGE, tag=b"model", offer=offer) as tier:
        assert buffer.closed and not offer.closed
        store(tier, b"first", b"hello")
        command = [sys.executable, "-c", textwrap.dedent(JOINER), str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "received\n"
            tier.close()
            assert offer.closed and not path.exists()
            assert child.communicate("\n", timeout=300)[0] == "hello 2\n"


def test_offers_and_pickles_outlive_the_takeover(simulated, tmp_path):
    buffer = shareable()
    pickled, offer = pickle.dumps(buffer), buffer.share(tmp_path / "socket")
    tier = egmem.kv.Tier.attach(buffer, page_bytes=PAGE)
    received = pickle.loads(pickled)
    assert received.nbytes == egmem.receive(offer.path).nbytes
    received.close()
    tier.close()
    later = egmem.receive(offer.path)
    assert not offer.closed, "it is not the tier's"
    view = memoryview(later)
    with pytest.raises(egmem.InUse, match=r"1 live view\(s\)"):
        egmem.kv.Tier.attach(later)
    view.release()
    offer.close()
    with pytest.raises(egmem.InvalidArgument, match="tag"):
        egmem.kv.Tier.attach(later, tag=b"other")
    assert egmem.kv.Tier.attach(later).found["generation"] == 2


def test_a_refused_buffer_stays_offered(simulated, tmp_path):
    buffer = shareable()
    with buffer.share(tmp_path / "socket") as offer, egmem.receive(offer.path) as received:
        view = memoryview(buffer)
        with pytest.raises(egmem.InUse, match=r"1 live view\(s\)"):
            egmem.kv.Tier.attach(buffer, page_bytes=PAGE)
        view.release()
        with pytest.raises(egmem.InvalidArgument):
            egmem.kv.Tier.attach(buffer, pages=100, page_bytes=PAGE, offer=offer)
        buffer.fill(7, 0, 1)
        assert received.read(0, 1) == b"\7" and not offer.closed
        with pytest.raises(egmem.InUse):
            buffer.close()
    buffer.close()


def test_memory_must_be_large_enough(driver):
    with pytest.raises(egmem.Error):
        egmem.kv.Tier.attach(egmem.Buffer(PAGE, driver=driver), pages=10_000, page_bytes=PAGE)
    with pytest.raises(TypeError):
        egmem.kv.attach("unix:/nowhere", "kv", create=True)


@pytest.fixture
def fetches(monkeypatch):
    """The options of each fetch of `egmem.kv.attach`."""
    asked = []

    class Client:
        def __init__(self, *arguments, **options):
            self.client = egmem.connect(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            self.client.close()

        def __getattr__(self, name):
            return getattr(self.client, name)

        def fetch(self, *arguments, **options):
            asked.append(options)
            return self.client.fetch(*arguments, **options)

    monkeypatch.setattr(egmem.kv, "connect", Client)
    return asked


def test_created_memory_must_be_the_users_own(server, fetches):
    """Another peer may create the name between the creation and the fetch."""
    driver = egmem.simulated("gh200")
    egmem.kv.attach(server, "kv", pages=4, page_bytes=PAGE, create=True, driver=driver).close()
    egmem.kv.attach(server, "kv", driver=driver).close()
    with egmem.connect(server, driver=driver) as client:
        assert [fetch["expect_owner"] for fetch in fetches] == [client.peer_name, None]
    with pytest.raises(egmem.ExchangeError, match="owner"):
        egmem.kv.attach(server, "kv", expect_owner="@server", driver=driver)
