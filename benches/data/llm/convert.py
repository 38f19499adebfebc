#!/usr/bin/env python3
"""Turn a trace of requests to a language model into a log of allocations for `replay`.

The log is that of a KV cache with a fixed capacity. Each request gets some blocks whose sizes follow its tokens;
the oldest requests are evicted until those blocks fit. A block is never split, and a request is evicted whole.

Reads Mooncake's traces (JSON lines with timestamp, input_length, output_length) and Azure's (CSV with TIMESTAMP,
ContextTokens, GeneratedTokens). Needs nothing but Python's standard library.
"""

import argparse
import collections
import csv
import datetime
import json
import sys

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def size(text):
    """Return a number of bytes, as in 4096 or 4GiB."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def blocks(text):
    """Return (count, bytes for each token) pairs, as in 8x1152,4x64."""
    pairs = []
    for part in text.split(","):
        count, _, per_token = part.partition("x")
        pairs.append((int(count), int(per_token)))
    return pairs


def requests(file):
    """Yield (seconds since the first request, tokens) for each request of a trace in either format."""
    first = None
    lines = iter(file)
    head = next(lines, "")
    if head.lstrip().startswith("{"):
        for line in [head, *lines]:
            if line.strip():
                entry = json.loads(line)
                seconds = entry["timestamp"] / 1000
                first = seconds if first is None else first
                yield seconds - first, entry["input_length"] + entry["output_length"]
        return
    for row in csv.DictReader([head, *lines]):
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        moment = datetime.datetime.fromisoformat(whole + "+00:00").timestamp()
        seconds = moment + float("0." + (fraction or "0"))
        first = seconds if first is None else first
        yield seconds - first, int(row["ContextTokens"]) + int(row["GeneratedTokens"])


def convert(trace, capacity, kinds, out):
    """Write the log. Returns the number of requests, and of those larger than the cache, which are left out."""
    print("Thread,Time,Action,Pointer,Size,Stream", file=out)
    live = collections.deque()
    used = served = skipped = 0
    # Pointers only tell blocks apart: every block has a number of its own.
    pointer = 1
    for seconds, tokens in trace:
        sizes = [tokens * per_token for count, per_token in kinds for _ in range(count)]
        need = sum(sizes)
        if need > capacity:
            skipped += 1
            continue
        served += 1
        while used + need > capacity:
            evicted = live.popleft()
            for old, bytes_ in evicted:
                print(f"1,{seconds:.6f},free,{old:#x},{bytes_},0x0", file=out)
                used -= bytes_
        new = []
        for bytes_ in sizes:
            print(f"1,{seconds:.6f},allocate,{pointer:#x},{bytes_},0x0", file=out)
            new.append((pointer, bytes_))
            pointer += 1
        used += need
        live.append(new)
    return served, skipped


def main():
    """Read the options, convert, and report the counts of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="the trace, or - for standard input")
    parser.add_argument("--cache", type=size, default="4GiB", help="the cache's bytes (default: 4GiB)")
    parser.add_argument(
        "--blocks",
        type=blocks,
        default="8x1152,4x64",
        help="COUNTxBYTES,…: a request's blocks, and their bytes for each token (default: 8x1152,4x64)",
    )
    parser.add_argument("--requests", type=int, help="only so many")
    options = parser.parse_args()
    file = sys.stdin if options.trace == "-" else open(options.trace, encoding="utf-8")
    with file:
        trace = requests(file)
        if options.requests is not None:
            trace = (request for request, _ in zip(trace, range(options.requests)))
        served, skipped = convert(trace, options.cache, options.blocks, sys.stdout)
    if skipped:
        print(f"{skipped} of {served + skipped} requests are larger than the cache: left out", file=sys.stderr)


if __name__ == "__main__":
    main()
