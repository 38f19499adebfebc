"""``python -m egmem doctor|topo|ps``: the reports of the command line ``egmem``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import List, Optional

from . import Error, __version__, _egmem, doctor, ps, ps_dict, simulated


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m egmem", description="Extended GPU Memory: what works here.")
    parser.add_argument("--version", action="version", version=f"egmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("doctor", "report what works here, why the rest does not, and what to do about it"),
        ("topo", "draw the node: its sockets, memories, GPUs and links"),
        ("ps", "show whose memory it is: all processes of this user that offer their ledgers"),
        ("probe", argparse.SUPPRESS),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--sim", metavar="PRESET|FILE.json", help="simulate a machine: gh200, gh200x4, gb200, h200x8")
        if name != "probe":
            command.add_argument("--json", action="store_true", help="print it as JSON")
        if name == "doctor":
            command.add_argument("-a", "--all", action="store_true", help="list every node and GPU, not only differences")
            command.add_argument("--timeout", type=float, default=30.0, help="seconds before a trial counts as hung")
        if name == "topo":
            command.add_argument("--svg", metavar="FILE|-", help="draw as SVG to this file; - is standard output")
    return parser


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _doctor(options: argparse.Namespace) -> int:
    report = doctor(sim=options.sim, timeout=options.timeout)
    if options.json:
        _print_json(report.to_dict())
    else:
        sys.stdout.write(report.to_text(options.all))
    return 0 if report.works else 1


def _topo(options: argparse.Namespace) -> int:
    if options.sim:
        topology = simulated(options.sim).topology()
    else:
        topology, why = _egmem._topology_or_why()
        if why is not None:
            message, remedy = why
            sys.stderr.write(f"warning: {message}; what to do: {remedy}\nOnly the host's nodes are shown.\n")
    if options.json:
        _print_json(topology.to_dict())
    elif options.svg and options.svg != "-":
        with open(options.svg, "w", encoding="utf-8") as file:
            file.write(topology.to_svg())
    else:
        sys.stdout.write(topology.to_svg() if options.svg else topology.to_text())
    return 0


def _ps(options: argparse.Namespace) -> int:
    driver = simulated(options.sim) if options.sim else None
    if options.json:
        _print_json(ps_dict(driver))
    else:
        sys.stdout.write(ps(driver))
    return 0


def _probe(options: argparse.Namespace) -> int:
    _egmem._probe(options.sim)
    return 0


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    commands = {"doctor": _doctor, "topo": _topo, "ps": _ps, "probe": _probe}
    try:
        return commands[options.command](options)
    except Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ValueError) else 1
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
