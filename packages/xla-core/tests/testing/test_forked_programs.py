"""Programs that tests run in forked processes: what is known of one that does not end."""

from __future__ import annotations

import os
import subprocess

import pytest


def test_a_program_that_takes_too_long_says_where_it_was(program_servers, tmp_path, monkeypatch):
    code = "import time\nprint('begun', flush=True)\ndef waits():\n    time.sleep(1000)\nwaits()\n"
    monkeypatch.setenv(
        "TORCH_DEVICE_BACKEND_AUTOLOAD", "0"
    )  # as the server has it: it begins at once
    environment = dict(os.environ)
    server = next(program_servers)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        server.run(code, cwd=str(tmp_path), environment=environment, timeout=3)
    assert caught.value.stdout == "begun\n"
    assert 'File "<string>", line 4 in waits' in caught.value.stderr
    assert "line 4 in waits" in caught.value.__notes__[0]
    again = server.run("print(1)", cwd=str(tmp_path), environment=environment, timeout=60)
    assert (again.returncode, again.stdout) == (0, "1\n")
