"""`python -m egmem`, and that its output is the command line's."""

import json
import os
import subprocess
import sys

import pytest

import egmem

PROGRAM = os.environ.get("EGMEM_TEST_PROGRAM", "")
needs_program = pytest.mark.skipif(not os.access(PROGRAM, os.X_OK), reason="EGMEM_TEST_PROGRAM names no program egmem")


def run(*arguments, status=0, program=(sys.executable, "-m", "egmem"), **environment):
    ended = subprocess.run([*program, *arguments], capture_output=True, text=True, env={**os.environ, **environment})
    assert ended.returncode == status, ended.stderr
    return ended


def test_doctor_tries_in_other_processes():
    ended = run("doctor", "--sim", "gh200")
    assert "SIMULATED" in ended.stdout and "Extended GPU Memory works, for 1 of 1 GPU." in ended.stdout
    report = egmem.doctor(sim="gb200")
    assert report.works and report.working_gpus == list(range(len(report.to_dict()["topology"]["gpus"])))
    assert report.to_text() == str(report) and len(report.to_text(all=True)) >= len(str(report))
    assert all(finding and remedy for finding, remedy in report.advice)
    assert json.loads(run("doctor", "--sim", "gh200", "--json").stdout)["works"] is True


def test_doctor_without_a_driver_fails_and_says_why():
    try:
        egmem.open()
        pytest.skip("this machine has a driver")
    except egmem.NoDriver:
        pass
    assert "does NOT work" in run("doctor", status=1).stdout
    assert "Only the host's nodes are shown." in run("topo").stderr


def test_a_child_that_dies_is_an_answer(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    report = egmem.doctor(sim="gh200")
    assert not report.works and "SIGKILL" in report.to_text()


def test_topo(tmp_path):
    text = run("topo", "--sim", "gh200x4").stdout
    assert text == egmem.simulated("gh200x4").topology().to_text()
    path = tmp_path / "topo.svg"
    run("topo", "--sim", "gh200", "--svg", str(path))
    assert path.read_text() == run("topo", "--sim", "gh200", "--svg", "-").stdout
    assert len(json.loads(run("topo", "--sim", "gh200x4", "--json").stdout)["gpus"]) == 4


def test_ps_and_wrong_usage():
    assert run("ps", "--sim", "gh200").stdout == run("ps", "--sim", "gh200").stdout
    assert isinstance(json.loads(run("ps", "--sim", "gh200", "--json").stdout), dict)
    assert "no-such" in run("topo", "--sim", "no-such", status=2).stderr
    run(status=2)
    assert run("--version").stdout.strip() == f"egmem {egmem.__version__}"


@needs_program
@pytest.mark.parametrize("arguments", [("doctor", "--all"), ("doctor",), ("topo",), ("ps",)])
def test_the_texts_are_the_command_line_s(arguments):
    arguments = (*arguments, "--sim", "gh200x4")
    assert run(*arguments).stdout == run(*arguments, program=(PROGRAM,)).stdout
