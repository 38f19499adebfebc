"""Tiers of several sizes of pages, and of several members."""

import os
import threading

import pytest

import egmem
import egmem.kv

SIZES = [64 << 10, 18 << 10, 8256]
NBYTES = 16 << 20


@pytest.fixture
def tier(driver):
    return egmem.kv.Tier(bytes="16MiB", page_bytes=["64KiB", 18 << 10, 8256], node=1, driver=driver)


def store(tier, keys, group=0):
    """Stores pages; returns the keys that made room, with their groups."""
    with tier.prepare_store(keys, group=group) as writing:
        writing.commit()
        return list(zip(writing.evicted_groups, writing.evicted))


def test_groups_have_pages_of_their_sizes(tier):
    assert (tier.groups, tier.page_bytes) == (3, SIZES[0])
    assert [tier.page_bytes_of(group) for group in range(3)] == SIZES
    assert "3 groups of pages of 64 KiB, 18 KiB, 8.06 KiB on" in repr(tier)
    with tier.prepare_store([b"a", b"a", b"b"], group=[0, 2, 1]) as writing:
        assert [writing.view(index).nbytes for index in range(3)] == [SIZES[0], SIZES[2], SIZES[1]]
        for index in range(3):
            writing.view(index).fill(index + 1)
        writing.commit()
    assert tier.lookup([b"a", b"b"]) == 1 and tier.lookup([b"b", b"a"], group=1) == 1
    assert tier.lookup([b"a", b"b", b"a"], group=(0, 1, 2)) == 3
    for group, key, byte in [(0, b"a", 1), (2, b"a", 2), (1, b"b", 3)]:
        with tier.prepare_load([key], group=group) as load:
            assert load.view(0).read() == bytes([byte]) * SIZES[group]
    with pytest.raises(egmem.NotReady):
        tier.prepare_load([b"b"])


def test_keys_have_their_groups(tier):
    for group, key in [(2, b"a"), (0, b"a"), (1, b"b")]:
        store(tier, [key], group)
    pages = {(group, key): page for group, key, page in tier.keys(groups=True)}
    assert list(pages) == [(2, b"a"), (0, b"a"), (1, b"b")]
    assert tier.keys() == [(key, page) for (_, key), page in pages.items()]
    tier.touch([b"a"], group=2)
    assert [found[:2] for found in tier.keys(groups=True)] == [(0, b"a"), (1, b"b"), (2, b"a")]
    assert tier.remove([b"a", b"b"], group=[0, 2]) == 1
    assert [found[:2] for found in tier.keys(groups=True)] == [(1, b"b"), (2, b"a")]


def test_groups_make_room_for_each_other(tier):
    """Pages of one group that were not used for long make room for another group's."""
    numbers = [number.to_bytes(4, "little") for number in range(NBYTES // SIZES[0])]
    for number in numbers:
        store(tier, [number])
    with tier.events() as events:
        evicted = [gone for number in numbers for gone in store(tier, [number], 1)]
        kinds = {(event.kind, event.group) for event in iter(lambda: events.get(0), None)}
    assert kinds == {("stored", 1), ("evicted", 0)}
    assert {group for group, _ in evicted} == {0}
    assert tier.lookup([numbers[-1]]) == 1, "it was used last"


def test_a_store_that_fails_tells_what_it_has_evicted(tier, driver):
    numbers = [number.to_bytes(4, "little") for number in range(NBYTES // SIZES[0])]
    twin = egmem.kv.Tier(bytes=NBYTES, page_bytes=SIZES, driver=driver)
    evicted = [store(twin, [numbers[0]])]
    of_extent = twin.stats()["usable"]
    evicted += [store(twin, [number]) for number in numbers[1:]]
    most = evicted.index(next(gone for gone in evicted if gone))
    # All extents but one are held.
    store(tier, [b"gone"], 1)
    for number in numbers[: most - of_extent]:
        store(tier, [number])
    load = tier.prepare_load(numbers[: most - of_extent])
    with pytest.raises(egmem.OutOfMemory) as full:
        tier.prepare_store([b"new", b"other"], group=[2, 1])
    assert (full.value.evicted, full.value.evicted_groups) == ([b"gone"], [1])
    load.release()
    assert tier.lookup([b"gone"], group=1) == 0
    assert (egmem.OutOfMemory("").evicted, egmem.OutOfMemory("").evicted_groups) == ((), ())


def test_events_of_groups_are_apart(tier):
    with tier.events() as events:
        store(tier, [b"a", b"b", b"c"], [1, 0, 1])
        found = [events.get(0) for _ in range(3)]
    assert [(event.group, event.keys) for event in found[:2]] == [(0, [b"b"]), (1, [b"a", b"c"])]
    assert found[2] is None and found[1].number == found[0].number + 1


def test_copies_have_the_groups_size(tier, driver):
    cache = egmem.Buffer(4 * SIZES[1], node=0, driver=driver)
    cache.fill(7)
    blocks = egmem.kv.GpuPages([cache.address], SIZES[1], SIZES[1], 4, keep=cache)
    stream = egmem.Stream(0, driver=driver)
    with tier.prepare_store([b"a"], group=1) as writing:
        tier.store(writing.pages, [2], blocks, stream=stream).wait()
        writing.commit()
    cache.fill(0)
    with tier.prepare_load([b"a"], group=1) as load:
        tier.load(load.pages, [1], blocks, stream=stream).wait()
    assert cache.read(SIZES[1], SIZES[1]) == b"\7" * SIZES[1]
    with tier.prepare_store([b"b"], group=0) as writing:
        with pytest.raises(egmem.InvalidArgument):
            tier.store(writing.pages, [0], blocks, stream=stream)
        writing.close()


@pytest.mark.parametrize("method", ["lookup", "touch", "prepare_store", "prepare_load", "remove"])
def test_wrong_groups_are_refused(tier, method):
    call = getattr(tier, method)
    with pytest.raises(egmem.InvalidArgument, match="group is 3; valid: 0 to 2"):
        call([b"a"], group=3)
    with pytest.raises(egmem.InvalidArgument, match="group is 256; valid"):
        call([b"a"], group=[256])
    with pytest.raises(egmem.InvalidArgument, match="group has 1 numbers for 2 keys"):
        call([b"a", b"b"], group=[0])
    for wrong in (-1, [-1]):
        with pytest.raises(egmem.InvalidArgument, match="is -1"):
            call([b"a"], group=wrong)
    for wrong in ("a", None, ["a"]):
        with pytest.raises(TypeError):
            call([b"a"], group=wrong)


def test_wrong_sizes_are_refused(tier, driver):
    with pytest.raises(egmem.InvalidArgument, match="group is 3; valid: 0 to 2"):
        tier.page_bytes_of(3)
    for sizes in ({"pages": 4}, {"bytes": NBYTES}, {"page_bytes": 4096}, {"page_bytes": 4096, "pages": 4, "bytes": NBYTES}):
        with pytest.raises(TypeError, match="page_bytes|either pages"):
            egmem.kv.Tier(driver=driver, **sizes)
    for sizes in ({"bytes": NBYTES, "page_bytes": []}, {"bytes": NBYTES, "page_bytes": [1] * 65}, {"pages": 4, "page_bytes": SIZES}):
        with pytest.raises(egmem.InvalidArgument):
            egmem.kv.Tier(driver=driver, **sizes)


def test_bytes_may_have_one_size_of_pages(driver):
    for sizes in (4096, [4096]):
        tier = egmem.kv.Tier(bytes=1 << 20, page_bytes=sizes, driver=driver)
        assert tier.groups == 1 and tier.page_bytes == 4096 and 200 < tier.pages < 256


def test_a_tier_of_groups_is_attached(driver, tmp_path):
    memory = egmem.Buffer(NBYTES, shareable=True, driver=driver)
    offer = memory.share(tmp_path / "socket")
    first = egmem.kv.Tier.attach(memory, page_bytes=SIZES, offer=offer)
    assert first.found["is_new"] and first.groups == 3
    store(first, [b"a"], 2)
    with pytest.raises(egmem.InvalidArgument, match="sizes of pages"):
        egmem.kv.Tier.attach(egmem.receive(offer.path, driver=driver), page_bytes=SIZES[:2])
    second = egmem.kv.Tier.attach(egmem.receive(offer.path, driver=driver))
    assert [second.page_bytes_of(group) for group in range(3)] == SIZES
    assert second.lookup([b"a"], group=2) == 1
    members = second.members()
    assert [(member.pid, member.is_self) for member in members] == [(os.getpid(), False), (os.getpid(), True)]
    assert repr(members[1]) == f"<egmem.kv.Member: process {os.getpid()}, this one>"
    second.close()
    assert [member.is_self for member in first.members()] == [True]


@pytest.mark.parametrize("call", [
    lambda tier: tier.lookup([b"a"]) == 1,
    lambda tier: tier.touch([b"b"]) is None and tier.keys()[0][0] == b"a",
    lambda tier: tier.stats()["ready"] == 2,
    lambda tier: len(tier.keys()) == 2,
    lambda tier: "ready_pages 2" in tier.metrics(),
])
def test_other_threads_run_while_one_waits_for_the_lock(driver, tmp_path, call):
    memory = egmem.Buffer(1 << 20, shareable=True, driver=driver)
    offer = memory.share(tmp_path / "socket")
    tier = egmem.kv.Tier.attach(memory, page_bytes=4096, offer=offer)
    store(tier, [b"a", b"b"])
    other = egmem.kv.Tier.attach(egmem.receive(offer.path, driver=driver))
    words = egmem.receive(offer.path, driver=driver)
    lock, members, waiters = 144, 4096, 0x100
    # The other member has it.
    words.write(b"\2\0\0\0" + words.read(members + 64, 4), lock)
    found = []
    thread = threading.Thread(target=lambda: found.append(call(tier)))
    thread.start()
    while thread.is_alive() and not int.from_bytes(words.read(lock, 8), "little") & waiters:
        pass
    words.write(bytes(8), lock)
    thread.join()
    assert found == [True], "this thread got the GIL before the wait was given up"
    other.close()
    tier.close()


class OneNumber:
    """As an array of one number: it has a length, and is an index."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return (1,)[index]

    def __index__(self):
        return 1


def test_a_sequence_has_a_group_for_each_key_and_a_number_is_for_all(tier):
    store(tier, [b"a", b"b"], group=1)
    assert tier.lookup([b"a", b"b"], group=OneNumber()) == 2
    assert tier.lookup([b"a", b"b"], group=range(1, 3)) == 1
    for sizes in ({4096}, {4096: 1}):
        with pytest.raises(TypeError, match=f"a size or offset is an integer or text .*, not {type(sizes).__name__}"):
            egmem.kv.Tier(pages=4, page_bytes=sizes, driver=tier.driver)
