"""What a person sees when a program stops: one line and an exit status."""

import pytest

from rlhf.errors import UserError, run


def raising(error: BaseException):
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (UserError("seed is 'x': expected an integer"), "error: seed is 'x': expected an integer\n", 1),
        (FileNotFoundError(2, "No such file", "a.csv"), "error: No such file: a.csv\n", 1),
        (OSError("disk on fire"), "error: disk on fire: no file name\n", 1),
        (FloatingPointError("gradients are not finite"), "error: gradients are not finite\n", 1),
        (KeyboardInterrupt(), "interrupted: run the same command again; training and sampling go on\n", 130),
    ],
)
def test_an_expected_failure_is_one_line_on_stderr(capsys, error, line, status):
    with pytest.raises(SystemExit) as stopped:
        run(raising(error))
    assert stopped.value.code == status
    assert capsys.readouterr() == ("", line)


def test_a_real_missing_file_names_the_file(capsys, tmp_path):
    with pytest.raises(SystemExit):
        run((tmp_path / "absent.txt").read_text)
    assert capsys.readouterr().err == f"error: No such file or directory: {tmp_path / 'absent.txt'}\n"


@pytest.mark.parametrize("error", [ValueError("a bug"), AssertionError(), SystemExit(2)])
def test_everything_else_passes_through_untouched(error):
    with pytest.raises(type(error)) as raised:
        run(raising(error))
    assert raised.value is error


def test_success_is_silent_and_runs_once(capsys):
    calls = []
    run(lambda: calls.append("ran"))
    assert calls == ["ran"]
    assert capsys.readouterr() == ("", "")
