"""The command line of the package: the same program as the binary `egmem`. test_serve.py has its service."""

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


def test_report_measures_in_other_processes():
    report = json.loads(run("report", "--sim", "gb200", "--json", "-").stdout)
    assert report["version"] == 1 and report["simulated"] == "gb200"
    parts = ("proofs", "bandwidth_gb_s", "latency_us", "pinning", "placement", "fabric")
    assert all(report[part]["rows"] and not report[part]["problems"] for part in parts)
    assert "32 of 32 held" in run("report", "--sim", "gb200").stdout


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


def test_an_interrupt_ends_the_doctor_before_its_next_question(monkeypatch, tmp_path):
    program, asked = tmp_path / "python", tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\necho >>{asked}\n[ "$(wc -l <{asked})" != 2 ] || kill -INT $PPID\nexec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(KeyboardInterrupt):
        egmem.doctor(sim="gh200x4")
    assert len(asked.read_text().splitlines()) == 2


def test_topo(tmp_path):
    text = run("topo", "--sim", "gh200x4").stdout
    assert text == egmem.simulated("gh200x4").topology().to_text()
    path = tmp_path / "topo.svg"
    run("topo", "--sim", "gh200", "--svg", str(path))
    assert path.read_text() == run("topo", "--sim", "gh200", "--svg", "-").stdout
    assert len(json.loads(run("topo", "--sim", "gh200x4", "--json").stdout)["gpus"]) == 4


def of_the_machine(report):
    """What a report of `ps` has of the machine; the rest is of other processes, which come and go."""
    report = json.loads(report)
    totals = {kind: [entry["total"] for entry in report[kind]] for kind in ("gpus", "nodes")}
    return sorted(report), totals


def test_ps_and_wrong_usage():
    assert "node 0" in run("ps", "--sim", "gh200").stdout
    assert "no-such" in run("topo", "--sim", "no-such", status=2).stderr
    run(status=2)
    assert run("--version").stdout.strip() == f"egmem {egmem.__version__}"


def test_the_environment_names_a_machine(monkeypatch):
    for command in ("doctor", "topo", "ps"):
        by_name = run(command, "--json", EGMEM_SIM="gb200").stdout
        by_option = run(command, "--json", "--sim", "gb200", EGMEM_SIM="no-such").stdout
        same = of_the_machine if command == "ps" else str
        assert same(by_name) == same(by_option)
        assert "invalid EGMEM_SIM: 'no-such'" in run(command, status=2, EGMEM_SIM="no-such").stderr
    monkeypatch.setenv("EGMEM_SIM", "gb200")
    assert egmem.doctor().to_dict()["simulated"] == "gb200"
    monkeypatch.setenv("EGMEM_SIM", "no-such")
    for call in (egmem.doctor, egmem.topology):
        with pytest.raises(egmem.InvalidArgument, match="EGMEM_SIM"):
            call()


def texts():
    """Commands whose output does not depend on the moment."""
    yield from ((command, "--sim", "gh200x4") for command in ("doctor", "topo"))
    yield ("doctor", "--all", "--json", "--sim", "gb200")
    yield ("topo", "--svg", "-", "--sim", "gb200")
    yield from (("--version",), ("--help",), ("-h",), (), ("no-such",), ("topo", "--no-such"), ("completions", "bash"))
    commands = ("serve", "ls", "fetch", "delete", "certs", "ps", "topo", "doctor", "report", "completions", "man")
    yield from ((command, "--help") for command in commands)
    yield ("ls", "unix:/nonexistent/egmem.sock")
    yield ("serve", "--config", "/nonexistent/egmem.toml")
    yield ("fetch", "unix:/nonexistent/egmem.sock", "a", "--sim", "gh200")


@needs_program
@pytest.mark.parametrize("arguments", list(texts()), ids=" ".join)
def test_texts_and_statuses_are_the_binary_s(arguments):
    def answer(*program):
        ended = subprocess.run([*program, *arguments], capture_output=True, text=True)
        return ended.returncode, ended.stdout, ended.stderr

    assert answer(sys.executable, "-m", "egmem") == answer(PROGRAM)


@needs_program
def test_ps_is_the_binary_s():
    arguments = ("ps", "--json", "--sim", "gb200")
    assert of_the_machine(run(*arguments).stdout) == of_the_machine(run(*arguments, program=(PROGRAM,)).stdout)


def test_the_script_is_this_program():
    """Where the package is installed, and not only on the path."""
    script = os.path.join(os.path.dirname(sys.executable), "egmem")
    if not os.access(script, os.X_OK):
        pytest.skip("the package is not installed")
    assert run("topo", "--sim", "gh200", program=(script,)).stdout == run("topo", "--sim", "gh200").stdout
    assert run("no-such", status=2, program=(script,)).stderr == run("no-such", status=2).stderr
