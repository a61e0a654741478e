"""Runs scripts in forks of a program that has imported a framework, because the import takes seconds.

Each script exits as any program does, and prints to files. The parent program only imports the framework, so it has no
threads that a fork would not copy.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

FORKS = """
import json, os, runpy, signal, sys

script, arguments = "", []
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.alarm(500)
        script, arguments, *outputs = json.loads(line)
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
sys.argv = ["-c", *arguments]
exec(script)
"""

# Runs a script with its arguments. Returns its status, its output and its errors.
Run = Callable[..., tuple[int, str, str]]

# A script that runs the program whose path is its first argument.
RUN = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@contextlib.contextmanager
def forked(imports: str, folder: Path, **environment: str) -> Iterator[Run]:
    """Starts a program that runs `imports`. Yields a function that forks a child for each script."""
    numbers = itertools.count()
    command = [sys.executable, "-c", textwrap.dedent(imports) + FORKS]
    with subprocess.Popen(
        command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        requests, answers = program.stdin, program.stdout

        def run(script: str, *arguments: str) -> tuple[int, str, str]:
            out, err = (folder / f"{next(numbers)}.{name}" for name in ("out", "err"))
            print(json.dumps([textwrap.dedent(script), arguments, str(out), str(err)]), file=requests, flush=True)
            return int(answers.readline()), out.read_text(), err.read_text()

        yield run
        requests.close()
        assert program.wait(60) == 0
