"""The programs for beginners run as they are, on the simulator, and stay short."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
QUESTIONS = HERE.parent / "questions"
# The program, the most lines that it may have, and what it prints.
PROGRAMS = [
    ("feature_cache.py", 45, "20000 lookups"),
    ("loader.py", 35, "batch 15 is filled"),
    ("kv_restart.py", 56, "'ready': 40"),
    ("million_blocks.py", 27, "1000000 blocks"),
    ("who_uses_memory.py", 15, "who_uses_memory.py:9"),
    ("tls.py", 60, "stranger has nothing"),
    ("mistakes.py", 25, "what to do"),
    ("questions.py", 25, "they overlap: False"),
]


@pytest.mark.parametrize("program, lines, says", PROGRAMS)
def test_a_program_of_a_beginner(program, lines, says):
    path = HERE / program
    assert len(path.read_text().splitlines()) <= lines
    environment = {**os.environ, "EGMEM_SIM": "gh200x4"}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("program", sorted(path.name for path in QUESTIONS.glob("*.py") if path.name != "ranks.py"))
def test_a_program_that_answers_a_question(program):
    done = subprocess.run([sys.executable, QUESTIONS / program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_programs_are_tested():
    programs = {path.name for path in HERE.glob("*.py")} - {"conftest.py", "vllm_config.py"}
    others = {name for name in programs if name.startswith(("egmem_", "test_"))}
    assert programs - others == {program for program, _, _ in PROGRAMS} | {"group.py"}


def ranks(program, says, **environment):
    """Runs four ranks of a program as a launcher does, with these variables, of which each may name the rank."""
    starts = []
    for rank in range(4):
        own = {name: value.format(rank=rank) for name, value in environment.items()}
        own = {**os.environ, "EGMEM_SIM": "gh200", **own}
        starts.append(
            subprocess.Popen(
                [sys.executable, program], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    for rank, start in enumerate(starts):
        out, error = start.communicate(timeout=600)
        assert start.returncode == 0, out + error
        assert out == f"rank {rank} of 4{says}\n"


def test_ranks_of_a_launcher_map_each_others_memory(tmp_path):
    program, says = HERE / "group.py", " mapped the others' memory"
    ranks(program, says, EGMEM_RANK="{rank}", EGMEM_SIZE="4", EGMEM_ADDRESS=f"unix:{tmp_path}/group")
    port = str(os.getpid())
    ranks(program, says, RANK="{rank}", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=port)


def test_ranks_put_and_get(tmp_path):
    says = ": put and got"
    ranks(QUESTIONS / "ranks.py", says, EGMEM_RANK="{rank}", EGMEM_SIZE="4", EGMEM_ADDRESS=f"unix:{tmp_path}/group")
