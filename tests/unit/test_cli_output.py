"""What the command writes: times, tables, what a terminal would obey; and how it begins and ends."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import pytest

from oncely.cli.__main__ import main
from oncely.cli.failure import Failure, printable
from oncely.cli.output import print_json, print_table, shown
from oncely.cli.times import age, moment


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (12_345, "12,345"),
        (timedelta(minutes=90), "1h 30m"),
        (datetime(2026, 1, 31, 13, tzinfo=timezone(timedelta(hours=1))), "2026-01-31 12:00:00Z"),
        ("\x1b[2Jgone\x07", r"\x1b[2Jgone\x07"),
    ],
)
def test_a_value_is_shown_as_a_person_reads_it(value: object, text: str) -> None:
    assert shown(value) == text


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("a\x1b]0;title\x07\r\nb\u202e é 日本") == "a\\x1b]0;title\\x07\\x0d\nb\\x202e é 日本"


def test_a_table_in_a_pipe_has_one_line_for_each_row_and_no_space_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(["id", "number", "error"], [["x" * 300, 1, "short"], ["y", 20, "[bold]long[/bold] words"]])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "─" not in line] == [
        f"{'id':<300}  number  error",
        f"{'x' * 300}       1  short",
        f"{'y':<300}      20  [bold]long[/bold] words",
    ]


def test_a_json_document_has_iso_times_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"at": datetime(2026, 1, 31, tzinfo=UTC), "age": timedelta(minutes=1)}, on_one_line=True)
    assert capsys.readouterr().out == '{"at": "2026-01-31T00:00:00+00:00", "age": 60.0}\n'


def test_what_has_no_form_in_json_is_an_error_and_no_guess() -> None:
    with pytest.raises(TypeError, match=r"^object is no JSON$"):
        print_json({"what": object()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(weeks=2)),
        ("0s", timedelta(0)),
    ],
)
def test_an_age_has_a_unit(text: str, expected: timedelta) -> None:
    assert age(text, "--older-than") == expected


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 d", "7y", "٧d", "9999999999d", "999999999w"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(Failure) as refused:
        age(text, "--older-than")
    assert refused.value.exit_code == 2


def test_a_moment_is_an_age_ago_or_in_iso_8601() -> None:
    assert moment(None, "--after") is None
    assert moment("2026-01-31T12:00:00Z", "--after") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    ago = moment("2h", "--after")
    assert ago is not None
    assert abs(datetime.now(UTC) - timedelta(hours=2) - ago) < timedelta(seconds=30)
    assert moment("999999999d", "--after") == datetime.min.replace(tzinfo=UTC)


def test_without_its_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "oncely: the command needs typer: pip install 'oncely[cli]'\n"


def test_the_process_has_help_a_version_completion_and_exit_codes() -> None:
    def run(*words: str) -> tuple[int, str, str]:
        # From bash, for which the completion is then.
        command = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, "-m", "oncely.cli", *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return ran.returncode, ran.stdout, ran.stderr

    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert [name for name in ("status", "dead", "prune", "effects", "keys", "run") if name not in out] == []
    assert run("--version")[:1] == (0,)
    assert run("--show-completion")[1].startswith("_oncely_completion()")
    code, out, err = run("status", "--absent")
    assert (code, out) == (2, "")
    assert "No such option: --absent" in err
