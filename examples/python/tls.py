"""Memory by name between processes that prove who they are: certificates, a server, a client.

EGMEM_SIM=gh200 python examples/python/tls.py runs it without a GPU.
"""

import pathlib
import subprocess
import sys
import tempfile

import egmem

EGMEM = [sys.executable, "-m", "egmem"]
CONFIG = """
listen = ["tcp://127.0.0.1:0"]
[tls]
ca = "{folder}/ca.pem"
cert = "{folder}/server.pem"
key = "{folder}/server.key"
[[buffer]]
name = "weights"
bytes = "64MiB"
node = 0
who = ["trainer"]
"""


def use(address, folder):
    for name in ("trainer", "stranger"):
        files = {"ca": folder / "ca.pem", "cert": folder / f"{name}.pem", "key": folder / f"{name}.key"}
        try:
            with egmem.connect(address, expect_peer="server", **files) as client, client.fetch("weights") as weights:
                weights.write(b"by the trainer")
                print(f"{name} has {weights}")
        except egmem.Refused as error:
            print(f"{name} has nothing: {error.message}")
    try:
        egmem.connect(address)
    except egmem.Error as error:
        print(f"without certificates: {error}")


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    subprocess.run([*EGMEM, "certs", "init", "--out", folder], check=True)
    subprocess.run([*EGMEM, "certs", "issue", "server", "--ca", folder, "--san", "127.0.0.1"], check=True)
    for peer in ("trainer", "stranger"):
        subprocess.run([*EGMEM, "certs", "issue", peer, "--ca", folder], check=True)
    config = folder / "egmem.toml"
    config.write_text(CONFIG.format(folder=folder))
    with subprocess.Popen([*EGMEM, "serve", "--config", config], stdout=subprocess.PIPE, text=True) as server:
        try:
            use(server.stdout.readline().split()[-1], folder)
        finally:
            server.terminate()
