"""egmem.kv: tiers whose memory grows in the background."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import egmem
import egmem.kv

PAGE = 1 << 20
PAGES = 1000
CHUNK = 64 << 20


def key(number):
    return number.to_bytes(4, "little") * 8


def in_background(driver, **options):
    return egmem.kv.Tier(PAGES, PAGE, node=0, background=True, driver=driver, **options)


def test_pages_are_used_while_others_come(driver):
    free = driver.topology().free_memory(0)
    told = []
    tier = in_background(driver, progress=lambda done, total: told.append((done, total)))
    total = (1 << 20) * (PAGES + 2)  # the table takes less than a page, and the granularity is 2 MiB
    assert told == [(CHUNK, total)], "the first chunk has the table and pages"
    assert 62 <= tier.stats()["usable"] <= PAGES and tier.pages == tier.stats()["pages"] == PAGES
    assert tier.growth in ("growing", "complete")
    with tier.prepare_store([key(number) for number in range(8)]) as store:
        assert store.pages[0] == 0
        store.view(0).write(b"first")
        store.commit()
    assert tier.lookup([key(number) for number in range(9)]) == 8
    tier.wait_grown(lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1] == (total, total)
    tier.wait_grown()
    assert (tier.growth, tier.stats()["usable"]) == ("complete", PAGES)
    with tier.prepare_load([key(0)]) as load:
        assert load.view(0).read(0, 5) == b"first"
    tier.close()
    with pytest.raises(egmem.Closed):
        tier.wait_grown()
    del store, load
    gc.collect()
    assert driver.topology().free_memory(0) == free


def test_growth_is_cancelled(driver):
    tier = in_background(driver)
    tier.cancel_growth()
    try:
        tier.wait_grown()
        assert tier.growth == "complete", "it was faster"
    except egmem.Error as error:
        assert "cancelled after" in error.message and tier.growth == "stopped"
    usable = tier.stats()["usable"]
    assert (usable == PAGES) == (tier.growth == "complete")
    with tier.prepare_store([key(number) for number in range(usable)]) as store:
        store.commit()
    if usable < PAGES:
        with pytest.raises(egmem.OutOfMemory, match="growth was stopped"):
            tier.prepare_store([key(number) for number in range(PAGES)])
    tier.close()
    tier.close()


def test_a_tier_in_the_foreground_tells_its_progress(driver):
    told = []
    tier = egmem.kv.Tier(PAGES, PAGE, node=0, driver=driver, progress=lambda done, total: told.append(done))
    assert told == sorted(told) and told[0] == CHUNK and len(told) == 16
    assert (tier.growth, tier.stats()["usable"]) == ("complete", PAGES)
    tier.cancel_growth()
    tier.wait_grown(lambda done, total: told.append(done == total))
    assert told[-1] is True


@pytest.mark.parametrize("background", [False, True])
def test_an_exception_while_it_is_created_gives_everything_back(driver, background):
    free = driver.topology().free_memory(0)

    class Stop(Exception):
        pass

    def stop(done, total):
        assert done == CHUNK
        raise Stop

    with pytest.raises(Stop):
        egmem.kv.Tier(PAGES, PAGE, node=0, background=background, progress=stop, driver=driver)
    assert driver.topology().free_memory(0) == free

    def interrupt(done, total):
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            egmem.kv.Tier(PAGES, PAGE, node=0, background=background, progress=interrupt, driver=driver)
        assert driver.topology().free_memory(0) == free
        tier = in_background(driver)
        with pytest.raises(KeyboardInterrupt):
            tier.wait_grown(interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(Stop):
        tier.wait_grown(lambda done, total: stop(CHUNK, total))
    tier.wait_grown()
    assert tier.stats()["usable"] == PAGES, "the growth went on"


def test_threads_use_a_tier_that_grows(driver):
    tier = in_background(driver)
    failures = []

    def work(first):
        try:
            for number in range(first, first + 50):
                with tier.prepare_store([key(number)]) as store:
                    store.view(0).write(number.to_bytes(4, "little"))
                    store.commit()
                with tier.prepare_load([key(number)]) as load:
                    assert load.view(0).read(0, 4) == number.to_bytes(4, "little")
        except egmem.NotReady:
            pass  # evicted in between
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    threads.append(threading.Thread(target=tier.wait_grown))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and tier.growth == "complete"


WAIT = "threading.Thread(target=tier.wait_grown, daemon=True).start()"


@pytest.mark.parametrize("end", ["", "del tier", "tier.close()", "os._exit(0)", WAIT])
def test_a_program_may_end_while_it_grows(end):
    code = """
        import os, threading
        import egmem, egmem.kv
        driver = egmem.simulated("gh200")
        tier = egmem.kv.Tier(100_000, "1MiB", node=0, background=True, progress=lambda done, total: None, driver=driver)
    """
    code = textwrap.dedent(code) + end
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_sees_its_parents_growth_as_stopped(driver):
    tier = in_background(driver)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(egmem.InvalidArgument):
                tier.wait_grown()
            with pytest.raises(egmem.InvalidArgument):
                tier.growth
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tier.wait_grown()
    assert tier.stats()["usable"] == PAGES
