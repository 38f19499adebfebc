#!/usr/bin/env python3
"""Record the allocations and frees of PyTorch and CuPy programs as logs for `replay`.

Each program runs in a process of its own and writes NAME.csv.gz, in the columns of RMM's `logging_resource_adaptor`.
The header's last column describes the recording: program, date, versions, GPU, seed. A program that fails does not
stop the others; its log until then is in NAME.partial.csv.gz.

Needs PyTorch or CuPy and a GPU. With --device cpu the programs run on the CPU, for a check of their logic; only
`offload` records anything then.
"""

import argparse
import datetime
import gzip
import os
import platform
import subprocess
import sys
import time
import traceback

# No __pycache__ in the tree.
sys.dont_write_bytecode = True

PROGRAMS = ["training", "generation", "offload", "dataframe"]
COLUMNS = "Thread,Time,Action,Pointer,Size,Stream"
# A program ends after so many seconds, or after its events.
SECONDS = 60
# One that hangs is killed; a first start compiles kernels.
LONGEST = 180


class Log:
    """Allocations and frees in their order."""

    def __init__(self):
        self.start = time.perf_counter()
        self.lines = []
        self.threads = {}
        self.about = {}

    def seconds(self):
        """Return the seconds since the log began."""
        return time.perf_counter() - self.start

    def add(self, action, pointer, size, thread=0, stream=0, seconds=None):
        """Add a line. `action` is allocate or free; without `seconds`, it happens now."""
        # Numbers of threads in the order of their first line: identifiers differ from run to run.
        thread = self.threads.setdefault(thread, len(self.threads) + 1)
        seconds = self.seconds() if seconds is None else seconds
        self.lines.append(f"{thread},{seconds:.6f},{action},{pointer:#x},{size},{stream:#x}\n")

    def add_snapshot(self, snapshot, device):
        """Add the history of one device's allocations in a snapshot of PyTorch.

        `free_requested` is left out: until `free_completed`, another stream may use the block. The other actions are
        about the caching allocator's segments. Snapshots name no threads.
        """
        actions = {"alloc": "allocate", "free_completed": "free"}
        first = None
        for entry in snapshot["device_traces"][device]:
            first = entry["time_us"] if first is None else first
            action = actions.get(entry["action"])
            if action:
                seconds = (entry["time_us"] - first) / 1e6
                self.add(action, entry["addr"], entry["size"], 0, entry["stream"], seconds)

    def write(self, path):
        """Write the log, packed."""
        about = "; ".join(f"{name}={value}" for name, value in self.about.items())
        # A comma or a line's end would end the column.
        about = " ".join(about.replace(",", " ").split())
        # Without the time of packing, equal logs are equal files.
        with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(f"{COLUMNS},recorded: {about}\n".encode())
            packed.writelines(line.encode() for line in self.lines)


class Limits:
    """When a program ends: after so many events, or SECONDS after it first asks."""

    def __init__(self, events):
        self.events = events
        self.end = None

    def more(self, events):
        """Return whether the program goes on after `events` events."""
        now = time.perf_counter()
        if self.end is None:
            self.end = now + SECONDS
        return events < self.events and now < self.end


def run(name, options):
    """Run one program in this process and write its log. Returns whether it succeeded."""
    log = Log()
    log.about = {
        "program": name,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "seed": options.seed,
        "python": platform.python_version(),
    }
    error = None
    try:
        if name == "dataframe":
            import cupy_program as programs
        else:
            import torch_programs as programs
        programs.record(name, log, Limits(options.events), options.device, options.seed)
    except Exception:
        error = traceback.format_exc()
    path = os.path.join(options.out, f"{name}{'.partial' if error else ''}.csv.gz")
    if log.lines:
        log.write(path)
        print(f"{path}: {len(log.lines)} events, {os.path.getsize(path)} bytes, {log.seconds():.1f} s")
    else:
        print(f"{name}: no events, {log.seconds():.1f} s")
    for key, value in log.about.items():
        print(f"  {key}: {value}")
    if error:
        print(f"{name} FAILED:\n{error}")
    return error is None


def main():
    """Run each program in a process of its own. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".", help="the folder of the logs (default: this one)")
    parser.add_argument("--only", choices=PROGRAMS, help="one program, in this process")
    parser.add_argument("--events", type=int, default=50_000, help="about how many of each (default: 50000)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    os.makedirs(options.out, exist_ok=True)
    if options.only:
        return 0 if run(options.only, options) else 1
    failed = []
    for name in PROGRAMS:
        try:
            command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--only", name]
            status = subprocess.run(command, timeout=LONGEST).returncode
        except subprocess.TimeoutExpired:
            status = f"killed after {LONGEST} s"
        if status != 0:
            print(f"{name}: exit status {status}")
            failed.append(name)
    print(f"{len(PROGRAMS) - len(failed)} of {len(PROGRAMS)} programs recorded")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
