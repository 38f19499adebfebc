"""Fixtures: simulated drivers. Tests that need a GPU are below gpu/, which pytest runs only if it is told to."""

import pytest

import egmem

collect_ignore = ["gpu"]


@pytest.fixture
def driver():
    return egmem.simulated("gh200x4")


@pytest.fixture(autouse=True)
def no_default_driver():
    egmem.set_default_driver(None)
    yield
    egmem.set_default_driver(None)
