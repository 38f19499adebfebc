"""A KV-cache tier that survives its engine: the engine is killed, and the next one finds every committed page.

EGMEM_SIM=gh200 python examples/python/kv_restart.py runs it without a GPU.
"""

import pathlib
import subprocess
import sys
import tempfile

import egmem.kv

PAGE_BYTES = 65536
CONFIG = """
listen = ["unix:{folder}/egmem.sock"]
[[buffer]]
name = "kv"
bytes = "8MiB"
node = 0
who = ["*"]
"""


def engine(address):
    """Stores forty pages, and does not end by itself."""
    tier = egmem.kv.attach(address, "kv", page_bytes=PAGE_BYTES, tag=b"model 1")
    for number in range(40):
        with tier.prepare_store([f"block {number}".encode()]) as store:
            store.view(0).fill(number)  # an engine copies from its GPU: tier.store(store.pages, …)
            store.commit()
    print("stored", flush=True)
    sys.stdin.read()


def restart(address):
    with subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"stored\n"
        first.kill()  # SIGKILL
    with egmem.kv.attach(address, "kv", tag=b"model 1") as tier, tier.prepare_load([b"block 7"]) as load:
        print("after SIGKILL:", tier.found)
        assert load.view(0).read() == bytes([7]) * PAGE_BYTES


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder, "egmem.toml")
        config.write_text(CONFIG.format(folder=folder))
        serve = [sys.executable, "-m", "egmem", "serve", "--config", config]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                restart(server.stdout.readline().split()[-1])
            finally:
                server.terminate()


engine(sys.argv[1]) if len(sys.argv) > 1 else main()
