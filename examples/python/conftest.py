"""The fixtures of the package's tests."""

import importlib.util
import pathlib

_path = pathlib.Path(__file__).resolve().parents[2] / "src/python/tests/conftest.py"
_spec = importlib.util.spec_from_file_location("egmem_tests_conftest", _path)
_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tests)
server = _tests.server
