"""The command table: light to import, one line and exit code 2 for wrong input, a traceback for faults of our own."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from spectrain import cli
from spectrain.heads.base import HeadError

HEAVY = ("torch", "transformers", "accelerate", "numpy", "matplotlib", "datasets", "numba", "triton")


def run(*arguments: str, probe: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys\nfrom spectrain.cli import main\ntry:\n main({arguments!r})\nfinally:\n {probe or 'pass'}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    code = leaving.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Puts a function in the place of `doctor`."""

    def install(function) -> None:
        monkeypatch.setattr(cli, "load", lambda path: function)

    return install


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"], ["eval", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    probe = f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    result = run(*arguments, probe=probe)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_entry_of_the_table_loads(name: str) -> None:
    command = cli.load(cli.COMMANDS[name].path)
    assert callable(command) or isinstance(command, typer.Typer)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(name, "--help") == 0
    assert "--help" in capsys.readouterr().out


def test_error_for_the_user_is_one_line_and_code_2(command, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor() -> None:
        raise HeadError("expected a head,\n  found none")

    command(doctor)
    assert exit_code("doctor") == 2
    assert capsys.readouterr().err == "spectrain: error: expected a head, found none\n"


def test_missing_file_is_one_line_and_code_2(command, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command(lambda: print((tmp_path / "absent.jsonl").read_text()))
    assert exit_code("doctor") == 2
    error = capsys.readouterr().err
    assert error.startswith("spectrain: error:") and "absent.jsonl" in error and error.count("\n") == 1


def test_fault_of_our_own_keeps_its_traceback(command) -> None:
    def doctor() -> None:
        raise RuntimeError("a bug")

    command(doctor)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["doctor"])


def test_value_error_of_another_library_keeps_its_traceback(command) -> None:
    command(lambda: int("not a number"))
    with pytest.raises(ValueError, match="invalid literal") as raised:
        cli.main(["doctor"])
    assert not cli.is_for_user(raised.value)


def test_plain_value_error_raised_by_us_is_for_the_user() -> None:
    from spectrain.infer.planes import BlockPool

    with pytest.raises(ValueError) as raised:
        BlockPool(1, 16)
    assert cli.is_for_user(raised.value)


ENDING = """
import argparse

class Mine:
    def draft(self):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "said", "line"),
    [
        ("raise SystemExit(7)", "SystemExit: 7", 6),
        ("raise SystemExit('no\\nluck')", "SystemExit: no luck", 6),
        ("argparse.ArgumentParser().parse_args(['--mine'])", "SystemExit: 2", 6),
    ],
)
def test_code_of_a_user_that_ends_the_process_is_named(
    command, capsys: pytest.CaptureFixture[str], body: str, said: str, line: int
) -> None:
    module = types.ModuleType("code_of_mine")
    exec(compile(ENDING.format(body=body), "/mine/code_of_mine.py", "exec"), module.__dict__)
    command(lambda: module.Mine().draft())
    assert exit_code("doctor") == 2
    expected = f"spectrain: error: code_of_mine:Mine.draft ended the command: {said} (code_of_mine.py:{line})"
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_a_reader_that_closes_the_pipe_is_no_error_of_anyones() -> None:
    """As in `spectrain fit --help | head -1`."""
    command = [sys.executable, "-m", "spectrain", "fit", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_interruption_exits_with_130(command) -> None:
    def doctor() -> None:
        raise KeyboardInterrupt

    command(doctor)
    assert exit_code("doctor") == 130


def test_unknown_option_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--nonsense") == 2
    assert "--nonsense" in capsys.readouterr().err


def test_doctor_shows_versions_and_escapes_extras(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor") == 0
    shown = capsys.readouterr().out
    assert "torch" in shown and "python" in shown and "cores" in shown


def test_doctor_fails_when_a_requirement_is_missing(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from spectrain.commands import doctor

    monkeypatch.setattr(doctor, "REQUIRED", ("a-package-nobody-has",))
    with pytest.raises(SystemExit) as leaving:
        doctor.doctor()
    assert leaving.value.code == 1
    assert "missing: a-package-nobody-has" in capsys.readouterr().out
