"""Tiers that several processes have by a name."""

import contextlib
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

import egmem
import egmem.kv

PAGE = 4096


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The folder of this user's sockets, and the simulated machine of this process and of those that it starts."""
    monkeypatch.setenv("EGMEM_SIM", "gh200")
    with tempfile.TemporaryDirectory() as runtime:  # a short path, unlike pytest's
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield pathlib.Path(runtime, "egmem")


def join(name="kv", **options):
    return egmem.kv.join(name, **{"pages": 16, "page_bytes": PAGE, **options})


def store(tier, key, contents):
    with tier.prepare_store([key]) as writing:
        writing.view(0).write(contents)
        writing.commit()


def load(tier, key, nbytes):
    with tier.prepare_load([key]) as reading:
        return reading.view(0).read(0, nbytes)


@contextlib.contextmanager
def process(code, *arguments):
    """Runs Python code in a process of its own, which is killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


MEMBER = """
    import sys, egmem.kv
    tier = egmem.kv.join("kv", pages=16, page_bytes=4096, tag=b"model")
    print(tier.found["is_new"], flush=True)
    for line in sys.stdin:
        command, key = line.split()
        if command == "store":
            with tier.prepare_store([key.encode()]) as store:
                store.view(0).write(key.encode())
                store.commit()
            print("stored", flush=True)
        else:
            with tier.prepare_load([key.encode()]) as load:
                print(load.view(0).read(0, len(key)).decode(), flush=True)
"""


def ask(member, command):
    member.stdin.write(command + "\n")
    member.stdin.flush()
    return member.stdout.readline().strip()


def test_the_first_process_creates_the_tier(folder):
    with join(tag=b"model", node=0) as tier:
        assert tier.found["is_new"] and (tier.pages, tier.page_bytes) == (16, PAGE)
        store(tier, b"key", b"contents")
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert modes == {"kv.tier": 0o600, "kv.join": 0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with join("another") as other:
            assert other.lookup([b"key"]) == 0
    assert not (folder / "kv.tier").exists()
    with join(pages=4) as tier:
        assert tier.found["is_new"] and tier.pages == 4


def test_a_killed_creator_is_replaced(folder):
    with process(MEMBER) as member:
        assert member.stdout.readline() == "True\n"
        assert ask(member, "store first") == "stored"
        with pytest.raises(egmem.InvalidArgument, match="tag"):
            join()
    assert (folder / "kv.tier").is_socket(), "a dead process left it"
    with join(tag=b"model") as tier:
        assert tier.found["is_new"] and tier.lookup([b"first"]) == 0


def test_a_forked_child_of_a_dead_creator_offers_nothing():
    code = MEMBER.replace(
        "for line", """
    import os
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    for line"""
    )
    with process(code) as creator:
        assert creator.stdout.readline() == "True\n"
        os.kill(creator.pid, signal.SIGKILL)
        os.waitid(os.P_PID, creator.pid, os.WEXITED | os.WNOWAIT)
        # The child lives, since its input is open, and has the socket.
        with join(tag=b"model", timeout=5) as tier:
            assert tier.found["is_new"]


def test_two_processes_have_one_tier():
    with join(tag=b"model") as tier, process(MEMBER) as member:
        assert member.stdout.readline() == "False\n"
        store(tier, b"ours", b"ours")
        assert ask(member, "load ours") == "ours"
        assert ask(member, "store theirs") == "stored"
        assert load(tier, b"theirs", 6) == b"theirs"


def test_statistics_free_the_pages_of_a_killed_process():
    code = """
        import sys, egmem.kv
        tier = egmem.kv.join("kv", pages=16, page_bytes=4096, tag=b"model")
        load = tier.prepare_load([b"key"])
        print("pinned", flush=True)
        sys.stdin.read()
    """
    with join(tag=b"model") as tier:
        store(tier, b"key", b"key")
        with process(code) as member:
            assert member.stdout.readline() == "pinned\n"
            assert tier.stats()["pinned"] == 1
        until = time.monotonic() + 60
        while tier.stats()["pinned"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(tier.members()) == 1


def test_a_member_outlives_the_creator():
    with process(MEMBER) as creator:
        assert creator.stdout.readline() == "True\n"
        assert ask(creator, "store first") == "stored"
        tier = join(tag=b"model")
    assert not tier.found["is_new"] and load(tier, b"first", 5) == b"first"
    store(tier, b"second", b"second")
    with join(tag=b"model") as new:
        assert new.found["is_new"], "its creator has ended"
    tier.close()


def test_of_many_at_once_one_creates():
    with contextlib.ExitStack() as ends:
        members = [ends.enter_context(process(MEMBER)) for _ in range(6)]
        found = sorted(member.stdout.readline() for member in members)
        assert found == ["False\n"] * 5 + ["True\n"]
        for number, member in enumerate(members):
            assert ask(member, f"store {number}") == "stored"
        for number, member in enumerate(members):
            assert ask(member, f"load {(number + 1) % 6}") == str((number + 1) % 6)


def test_a_process_without_sizes_waits_for_one_with_them():
    code = """
        import egmem.kv
        print("joining", flush=True)
        tier = egmem.kv.join("kv")
        print(tier.found["is_new"], tier.groups, tier.page_bytes_of(1), flush=True)
    """
    with process(code) as early:
        assert early.stdout.readline() == "joining\n"
        with join(pages=None, bytes="4MiB", page_bytes=[PAGE, "16KiB"]) as tier:
            assert tier.found["is_new"] and tier.groups == 2
            assert early.stdout.readline() == "False 2 16384\n"
    with pytest.raises(egmem.TimedOut, match="pass its sizes"):
        egmem.kv.join("kv", timeout=0)


def test_sizes_are_complete():
    for sizes in ({"pages": 16}, {"page_bytes": PAGE}, {"bytes": PAGE}, {"page_bytes": PAGE, "pages": 1, "bytes": PAGE}):
        with pytest.raises(TypeError, match="page_bytes, and either pages or bytes"):
            egmem.kv.join("kv", **sizes)
    with pytest.raises(TypeError, match="share bytes="):
        join(page_bytes=[PAGE, PAGE])
    with join(page_bytes=[PAGE]) as tier:
        assert (tier.pages, tier.groups) == (16, 1)


def test_others_wait_for_the_process_that_creates(folder):
    code = """
        import os, sys, egmem.kv
        def progress(done, total):
            print("creating", flush=True)
            sys.stdin.readline()
        egmem.kv.join("kv", pages=16, page_bytes=4096, backing="driver", progress=progress)
    """
    with process(code) as creator:
        assert creator.stdout.readline() == "creating\n"
        with pytest.raises(egmem.TimedOut, match=r"'kv' within 0.1 s"):
            join(timeout=0.1)
        creator.send_signal(signal.SIGKILL)
        with join() as tier:
            assert tier.found["is_new"]


def test_a_refused_tier_is_not_offered(folder):
    with pytest.raises(TypeError) as refused:
        join(unknown=1)
    assert not (folder / "kv.tier").exists(), refused
    for options in ({"page_bytes": 0}, {"pages": 0}, {"node": 99}):
        with pytest.raises(egmem.InvalidArgument):
            join(**options)
    assert not (folder / "kv.tier").exists()


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "é" * 33, "a\0b"])
def test_names(name):
    with pytest.raises(egmem.InvalidArgument, match="valid: 1 to 64 bytes"):
        join(name)


def test_a_name_may_be_odd(folder):
    for name in ("é" * 32, "..", "kv.tier", " "):
        join(name).close()
        assert (folder / f"{name}.join").exists()


def test_a_long_path_is_named(monkeypatch, tmp_path):
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(egmem.InvalidArgument, match="shorter name, or a shorter XDG_RUNTIME_DIR"):
        join()


def test_only_an_own_folder_is_used(folder, monkeypatch):
    def refused(why):
        with pytest.raises(egmem.Refused, match=why):
            join()

    folder.write_text("a file")
    refused("it is no folder")
    folder.unlink()
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")
    refused("it is no folder")
    folder.unlink()
    folder.mkdir()
    for mode in (0o750, 0o701, 0o777):
        folder.chmod(mode)
        refused(f"other users have access to it .mode {mode:04o}.")
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        refused(f"it belongs to user {os.getuid()}")
    join().close()


def test_a_folder_without_a_runtime_directory(monkeypatch):
    made = []
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", "relative")
        patch.setattr(os, "mkdir", lambda path, mode: made.append((path, mode)))
        patch.setattr(os, "lstat", lambda path: os.stat_result((stat.S_IFREG, *[0] * 9)))
        with pytest.raises(egmem.Refused, match=f"/tmp/egmem-{os.geteuid()} is not"):
            join()
    assert made == [(f"/tmp/egmem-{os.geteuid()}", 0o700)]
