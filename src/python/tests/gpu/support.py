"""Functions for the tests on a GPU. With EGMEM_REQUIRE_CUDA=1 a missing GPU, and a missing library that is not in OPTIONAL, is a
failure."""

import importlib
import os
import subprocess
import sys
import unittest

REQUIRED = os.environ.get("EGMEM_REQUIRE_CUDA") == "1"
OPTIONAL = ("cuda.core", "jax", "numba.cuda")


def needs(*modules):
    """Returns a decorator that skips a class where a library or the GPU is missing."""
    missing = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = f"{name}: {error}"
    required = [reason for name, reason in missing.items() if name not in OPTIONAL]
    if not missing:
        import egmem

        try:
            egmem.open()
        except egmem.Error as error:
            missing["egmem"] = str(error)
            required.append(str(error))
    if REQUIRED and required:
        raise AssertionError(f"EGMEM_REQUIRE_CUDA=1, but {required}")
    return unittest.skipIf(bool(missing), "; ".join(missing.values()))


def child(code, *, environment=None, timeout=300):
    """Runs Python code in a process of its own; returns its output. The process must end with status 0."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(environment or {})},
    )
    if ended.returncode != 0:
        raise AssertionError(f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout
