"""The command line: ``python -m egmem``, and the script ``egmem``."""

import os
import signal
import sys

from . import _egmem


def main() -> int:
    """Runs the command that the arguments name, and returns the exit status."""
    # Python's handler of Ctrl-C waits for Python code to run, and a command runs none. An ignored SIGINT stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Otherwise the next files to be opened would be standard input, output and error.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    return _egmem._run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
