"""Which keys come and go: queues, functions, and the counters for Prometheus."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

import egmem
import egmem.kv

PAGE = 4096


@pytest.fixture
def tier(driver):
    return egmem.kv.Tier(pages=4, page_bytes=PAGE, node=1, driver=driver)


def store(tier, *keys):
    with tier.prepare_store(keys) as writing:
        writing.commit()


def told(event):
    return (event.kind, event.keys)


def test_events_say_which_keys_come_and_go(tier):
    store(tier, b"before")
    events = tier.events()
    store(tier, b"a", b"b")
    tier.remove([b"none", b"before", b"b"])
    store(tier, b"c", b"d", b"e")
    tier.prepare_store([b"f", b"g"]).close()
    found = [events.get() for _ in range(4)]
    assert [told(event) for event in found] == [
        ("stored", [b"a", b"b"]),
        ("removed", [b"before", b"b"]),
        ("stored", [b"c", b"d", b"e"]),
        ("evicted", [b"a", b"e"]),
    ]
    numbers = [event.number for event in found]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert {event.group for event in found} == {0} and events.lost == 0
    assert repr(found[0]) == f"<egmem.kv.TierEvent {numbers[0]}: 2 key(s) stored>"
    assert events.get(0) is None and events.get(timeout=0.01) is None
    for wrong in (-1, 1e300):
        with pytest.raises(egmem.InvalidArgument, match="timeout"):
            events.get(wrong)


def test_keys_are_those_that_the_tier_keeps(tier):
    long = b"long" * 50
    with tier.events() as events:
        store(tier, long)
        assert events.get().keys == [tier.stored_key(long)]
    with pytest.raises(egmem.Closed):
        events.lost
    assert list(events) == []


def test_a_full_queue_loses_keys(tier):
    few, none = tier.events(3), tier.events(capacity=0)
    store(tier, b"a", b"b")
    store(tier, b"c", b"d")
    assert (few.lost, none.lost) == (1, 4)
    assert [told(few.get(0)) for _ in range(2)] == [("stored", [b"a", b"b"]), ("stored", [b"c"])]
    store(tier, b"e")
    assert told(few.get(0)) == ("evicted", [b"b"]), "there is room again"


def test_an_iterator_waits_and_ends_with_the_tier(tier):
    events, seen, first = tier.events(), [], threading.Event()

    def watch():
        for event in events:
            seen.append(told(event))
            first.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    store(tier, b"a")
    first.wait()
    store(tier, b"b")
    tier.close()
    watcher.join()
    assert seen == [("stored", [b"a"]), ("stored", [b"b"])]
    assert events.get() is None


def test_a_closed_queue_ends_a_wait(tier):
    events = tier.events()
    watcher = threading.Thread(target=lambda: list(events))
    watcher.start()
    events.close()
    watcher.join()
    store(tier, b"a")
    assert events.get() is None


@pytest.mark.parametrize("wait", ["list(events)", "events.get()", "events.get(1e19)"])
def test_ctrl_c_ends_a_wait(wait):
    code = """
        import sys, egmem, egmem.kv
        tier = egmem.kv.Tier(pages=4, page_bytes=4096, node=0, driver=egmem.simulated("gh200"))
        events = tier.events()
        try:
            print("waiting", flush=True)
            WAIT
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code).replace("WAIT", wait)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=300)[0] == "interrupted\n"


def test_a_forked_child_has_no_events(tier):
    events = tier.events()
    child = os.fork()
    if child == 0:
        try:
            events.get(0)
        except egmem.InvalidArgument:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_function_is_called_before_the_call_returns(tier):
    seen = []

    def see(event):
        # It may use the tier and the store: no lock is held.
        seen.append((*told(event), writing.pages, tier.lookup([b"a"]), threading.get_ident()))

    with tier.on_event(see) as subscription, tier.prepare_store([b"a"]) as writing:
        writing.commit()
        assert seen == [("stored", [b"a"], writing.pages, 1, threading.get_ident())]
        assert tier.remove([b"a"]) == 1 and len(seen) == 2
        subscription.close()
        store(tier, b"b")
    assert len(seen) == 2
    tier.on_event(seen.append)
    store(tier, b"c")
    assert len(seen) == 2, "the subscription was deleted"
    with pytest.raises(TypeError, match="no function"):
        tier.on_event(None)


def test_a_function_may_change_keys(tier):
    seen = []

    def see(event):
        seen.append(told(event))
        if event.kind == "evicted":
            store(tier, b"kept")
            seen.append("nested")

    with tier.on_event(see):
        store(tier, b"a", b"b", b"c", b"d")
        tier.prepare_store([b"e", b"f"]).close()
    expected = [("stored", [b"a", b"b", b"c", b"d"]), ("evicted", [b"d", b"c"])]
    assert seen[:2] == expected and seen[-1] == "nested"


def test_a_functions_exceptions_are_shown(tier, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: shown.append((args.exc_type, args.object)))

    def fail(event):
        raise ValueError

    with tier.on_event(fail):
        store(tier, b"a")
    assert shown == [(ValueError, fail)] and tier.lookup([b"a"]) == 1


def test_ctrl_c_in_a_function_reaches_the_program(tier):
    def interrupt(event):
        signal.raise_signal(signal.SIGINT)

    with tier.on_event(interrupt):
        writing = tier.prepare_store([b"a"])
        with pytest.raises(KeyboardInterrupt):
            writing.commit()
            for _ in range(1000):
                pass
    assert tier.lookup([b"a"]) == 1


def test_many_threads_change_keys_and_watch(tier):
    """Functions run while other threads use the same store."""
    numbers = []

    def work(number):
        for _ in range(50):
            with tier.prepare_store([b"%d" % number]) as writing:
                assert len(writing.pages) == 1
                writing.commit()
            tier.remove([b"%d" % number])

    with tier.events() as events, tier.on_event(lambda event: numbers.append(event.number)):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queued = [events.get(0).number for _ in range(400)]
    assert sorted(numbers) == queued, "the queue has the order of the changes"


def test_an_engine_that_watches_its_tier_is_freed(driver):
    class Engine:
        def __init__(self):
            self.tier = egmem.kv.Tier(pages=4, page_bytes=PAGE, node=1, driver=driver)
            self.subscription = self.tier.on_event(self.changed)

        def changed(self, event):
            pass

    engine = weakref.ref(Engine())
    gc.collect()
    assert engine() is None


def test_metrics(tier):
    store(tier, b"a")
    tier.lookup([b"a", b"b"])
    text = tier.metrics({"engine": 0, "model": 'a "b"'})
    labels = '{engine="0",model="a \\"b\\""}'
    assert f"\negmem_kv_ready_pages{labels} 1\n" in text
    assert "# TYPE egmem_kv_hits_total counter\negmem_kv_hits_total 1\n" in tier.metrics()
    with pytest.raises(TypeError):
        tier.metrics([("engine", 0)])
