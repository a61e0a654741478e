"""Maps whose function runs in processes: the same batches, states and errors as in threads."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from apart import wait_until
from fastpipe.typing import Mapped
from mapping import expected, ids, reader_of, values, with_y


def with_process(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": batch["x"], "y": rng.random(len(batch["x"])), "process": os.getpid()}


def fails_at_7(batch: dict[str, Any]) -> dict[str, Any]:
    if 7 in batch["x"]:
        raise KeyError("seven")
    return batch


def exits(batch: dict[str, Any]) -> None:
    os._exit(3)


class TwoPartError(Exception):
    """An error that can be pickled but not restored, since its arguments aren't those of its class."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fails_in_two_parts(batch: dict[str, Any]) -> None:
    raise TwoPartError("one", "two")


PROGRAM = """
import os, sys
import numpy as np
import fastpipe, mapping, test_map_processes

if __name__ == "__main__":
    mapped = mapping.reader_of().map(test_map_processes.with_process, seed=1, num_processes=1)
    print(next(iter(mapped))["process"], flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def mapped() -> Iterator[Mapped]:
    """Maps a reader. The processes start once."""
    with reader_of(epochs=1).map(with_y, num_processes=2) as mapped:
        yield mapped


def test_batches_are_those_of_the_reader_and_resume_at_every_step(mapped: Mapped) -> None:
    wanted = expected(reader_of())
    mapped.set_epoch(0)
    states = [mapped.state_dict()]
    for batch, value in zip(mapped, wanted, strict=True):
        assert values([batch]) == [value]
        states.append(mapped.state_dict())
    for step, state in enumerate(states):
        mapped.load_state_dict(json.loads(json.dumps(state)))
        assert values(mapped) == wanted[step:]
    assert values([mapped.batch_at(3, epoch=0)]) == wanted[3:4]
    # A pass that was left counts as an epoch.
    mapped.set_epoch(4)
    assert len(list(itertools.islice(mapped, 2))) == 2
    assert values(mapped) == expected(reader_of(), 5)


def test_random_numbers_do_not_depend_on_processes() -> None:
    threads = reader_of().map(with_process, seed=5, num_threads=2)
    with reader_of().map(with_process, seed=5, num_processes=2) as mapped:
        ours, theirs = list(mapped), list(threads)
        assert [batch["y"].tolist() for batch in ours] == [batch["y"].tolist() for batch in theirs]
        assert os.getpid() not in {batch["process"] for batch in ours}
        # A shard and a copy have processes of their own.
        with pickle.loads(pickle.dumps(mapped)) as copy, mapped.shard(2, 0) as shard:
            copy.set_epoch(0)
            assert [batch["y"].tolist() for batch in copy] == [batch["y"].tolist() for batch in theirs]
            shard.set_epoch(0)
            others = reader_of().shard(2, 0)
            assert list(map(ids, shard)) == list(map(ids, others))


def test_an_error_of_the_function_is_raised_at_its_batch() -> None:
    with reader_of(shuffle=False, shuffle_buffer=None).map(fails_at_7, num_processes=1) as mapped:
        batches = iter(mapped)
        assert ids(next(batches)) == list(range(5))
        for _ in range(2):
            with pytest.raises(KeyError, match="seven") as raised:
                next(batches)
            assert any("epoch 0, step 1" in note for note in raised.value.__notes__)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_process_that_ends_is_an_error_and_the_next_pass_has_others() -> None:
    ended = pytest.raises(fastpipe.FastpipeError, match=r"a process of map\(\) ended")
    with reader_of().map(exits, num_processes=1) as mapped, ended:
        next(iter(mapped))
    with reader_of(epochs=None).map(with_process, seed=1, num_processes=1) as mapped:
        batches = iter(mapped)
        first = next(batches)["process"]
        os.kill(first, signal.SIGKILL)
        with pytest.raises(fastpipe.FastpipeError, match=r"a process of map\(\) ended"):
            list(batches)
        again = next(iter(mapped))["process"]
        assert again != first
    # Closing the map ends its processes.
    assert wait_until(lambda: not os.path.exists(f"/proc/{again}") or sys.platform != "linux")


def test_errors_that_cannot_be_restored_are_named() -> None:
    with (
        reader_of().map(fails_in_two_parts, num_processes=1) as mapped,
        pytest.raises(RuntimeError, match=r"map\(\) raised TwoPartError: one and two"),
    ):
        next(iter(mapped))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_processes_end_with_a_program_that_does_not_close_them(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    # The output goes to a file: a process that doesn't end would keep a pipe open.
    with (tmp_path / "out").open("w+") as out:
        subprocess.run([sys.executable, path], stdout=out, env=environment, check=True, timeout=60)
        out.seek(0)
        process = int(out.read())
    assert wait_until(lambda: not os.path.exists(f"/proc/{process}"))


def test_wrong_arguments_are_refused() -> None:
    reader = reader_of()
    with pytest.raises(TypeError, match="can be pickled: define it at the top level"):
        reader.map(lambda batch: batch, num_processes=1)
    with pytest.raises(ValueError, match="num_threads or num_processes, not both"):
        reader.map(with_y, num_threads=1, num_processes=1)
    with pytest.raises(ValueError, match="num_processes must be between 0 and 1024"):
        reader.map(with_y, num_processes=-1)
    with pytest.raises(TypeError, match="num_processes"):
        reader.map(with_y, num_processes=1.5)  # type: ignore[arg-type]
