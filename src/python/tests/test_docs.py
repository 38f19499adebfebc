"""The Python programs of README.md and docs/ that run on the simulator, and the package's doctest."""

import doctest
import pathlib
import re

import pytest

import egmem
import egmem.kv

ROOT = pathlib.Path(__file__).resolve().parents[3]


PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
# Its programs are files, which test_examples starts.
PAGES.remove("docs/questions.md")


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, driver):
    egmem.set_default_driver(driver)
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize("page", ["README", "docs/coming-from", "docs/files", "docs/heap", "docs/ledger", "docs/python", "docs/sharing"])
def test_guides_show_python(page):
    assert "```py" in (ROOT / f"{page}.md").read_text(encoding="utf-8")


def test_docstrings():
    for module in (egmem, egmem.kv):
        result = doctest.testmod(module)
        assert result.attempted and result.failed == 0


def test_each_statistic_is_explained(driver):
    heap, words = egmem.Heap(0, driver=driver), {"bytes", "blocks", "free_after", "lookup"}
    for counted in (heap, egmem.Pool(0, driver=driver), egmem.kv.Tier(1, 1, driver=driver)):
        told = re.findall(r"`(\w+)`", type(counted).stats.__doc__)
        assert set(told) - words == set(counted.stats()) - words, type(counted)


def test_everything_has_a_docstring():
    for module, name in [(egmem, name) for name in egmem.__all__] + [(egmem.kv, name) for name in egmem.kv.__all__]:
        value = getattr(module, name)
        if name == "__version__":
            continue
        assert value.__doc__, name
        if isinstance(value, type):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_"):
                    assert member.__doc__, f"{name}.{attribute}"
