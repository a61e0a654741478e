"""fastpipe.tf.atds after errors: which rows are lost, and that iterations end.

The remaining rows were compared with tensorflow-io 0.37.1 on one thread: fastpipe never yields fewer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import fastavro
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow isn't installed", exc_type=ImportError)
import fastpipe  # noqa: E402 - beside TensorFlow
import fastpipe.tf  # noqa: E402 - needs TensorFlow
import processes  # noqa: E402 - beside fastpipe
from fastpipe.tf import atds  # noqa: E402 - needs TensorFlow
from fastpipe.tf.atds import ATDSDataset, DenseFeature  # noqa: E402 - needs TensorFlow

SCHEMA = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "id", "type": "long"}, {"name": "score", "type": ["null", "float"]}],
}
FEATURES = {"id": DenseFeature([], tf.int64), "score": DenseFeature([], tf.float32)}


def write(path: Path, start: int, stop: int, nulls: Collection[int] = (), per_block: int = 5) -> str:
    with path.open("wb") as file:
        writer = fastavro.write.Writer(file, SCHEMA, sync_interval=1 << 30)
        for i in range(start, stop):
            writer.write({"id": i, "score": None if i in nulls else i / 2})
            if (i - start + 1) % per_block == 0:
                writer.dump()
        writer.flush()
    return str(path)


def batches(dataset: Any) -> list[list[int]]:
    return [batch["id"].numpy().tolist() for batch in dataset]


def told(dataset: Any, most: int = 100) -> list[Any]:
    """Returns the batches and the classes of errors until the end."""
    found: list[Any] = []
    iterator = iter(dataset)
    while len(found) < most:
        try:
            found.append(next(iterator)["id"].numpy().tolist())
        except StopIteration:
            return found
        except tf.errors.OpError as error:
            found.append(type(error).__name__)
    raise AssertionError(f"the iteration does not end: {found}")


INVALID = "InvalidArgumentError"


@pytest.mark.parametrize(
    ("rows", "nulls", "per_block", "options", "expected"),
    [
        pytest.param(10, [5], 10, {"batch_size": 2}, [[0, 1], [2, 3], INVALID], id="the rest of the only block"),
        pytest.param(
            15, [7], 5, {"batch_size": 2}, [[0, 1], [2, 3], [4, 5], INVALID, [10, 11], [12, 13], [14]], id="a block"
        ),
        pytest.param(
            # tensorflow-io also loses 5 and 6, which are in the batch that fails.
            15,
            [12],
            5,
            {"batch_size": 7},
            [list(range(7)), INVALID, [7, 8, 9]],
            id="rows of the failed batch in other blocks",
        ),
        pytest.param(
            30,
            [12],
            5,
            {"batch_size": 12},
            [list(range(12)), INVALID, list(range(15, 27)), [27, 28, 29]],
            id="a batch of several blocks",
        ),
        pytest.param(
            30,
            [12],
            5,
            {"batch_size": 12, "drop_remainder": True},
            [list(range(12)), INVALID, list(range(15, 27))],
            id="without a remainder",
        ),
        pytest.param(
            # The planned epoch drops four of 28 rows. Two more are lost, and 16 to 27 make two batches.
            28,
            [14],
            4,
            {"batch_size": 6, "drop_remainder": True},
            [list(range(6)), list(range(6, 12)), INVALID, list(range(16, 22)), list(range(22, 28))],
            id="a remainder that fits after the error",
        ),
        pytest.param(20, [3, 8], 5, {"batch_size": 10}, [INVALID, INVALID, list(range(10, 20))], id="two in a batch"),
        pytest.param(20, range(0, 20, 5), 5, {"batch_size": 4}, [INVALID] * 4, id="every block"),
        pytest.param(20, range(0, 20, 5), 5, {"batch_size": 100}, [INVALID] * 4, id="every block of one batch"),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_loses_the_rest_of_its_block(
    tmp_path: Path, rows: int, nulls: list[int], per_block: int, options: Any, expected: Any, threads: int
) -> None:
    path = write(tmp_path / "a.avro", 0, rows, nulls, per_block)
    dataset = ATDSDataset(path, features=FEATURES, num_parallel_calls=threads, **options)
    assert told(dataset) == expected
    sound = [found for found in expected if found != INVALID]
    for _ in range(2):
        assert batches(dataset.ignore_errors()) == sound
        assert batches(dataset.prefetch(2).ignore_errors()) == sound
        assert batches(dataset.ignore_errors().prefetch(2).repeat(2)) == 2 * sound


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("buffer", [1, 20, 500])
@pytest.mark.parametrize("batch_size", [1, 7, 30])
def test_other_shuffled_rows_remain(tmp_path: Path, batch_size: int, buffer: int, drop_remainder: bool) -> None:
    nulls = {12, 57, 58, 95}
    path = write(tmp_path / "a.avro", 0, 100, nulls)
    options: dict[str, Any] = {"shuffle_buffer_size": buffer, "seed": 3, "drop_remainder": drop_remainder}
    for threads in (1, 3):
        dataset = ATDSDataset(path, batch_size, FEATURES, num_parallel_calls=threads, **options)
        found = told(dataset)
        rows = [i for batch in found if batch != INVALID for i in batch]
        assert found.count(INVALID) == 3
        assert len(set(rows)) == len(rows)
        # Rows before the null in a damaged block may have been yielded already.
        lost = {i for null in nulls for i in range(null // 5 * 5, null // 5 * 5 + 5)}
        assert set(rows) >= set(range(100)) - lost or drop_remainder
        assert not set(rows) & {i for null in nulls for i in range(null, null // 5 * 5 + 5)}
        assert len(rows) > 100 - len(lost) - batch_size * drop_remainder
        sizes = [len(batch) for batch in found if batch != INVALID]
        assert set(sizes[:-1]) <= {batch_size}
        if drop_remainder:
            assert set(sizes) <= {batch_size}


def test_shuffled_rows_after_errors_do_not_depend_on_threads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", 0, 100, {12, 57})
    options: dict[str, Any] = {"shuffle_buffer_size": 20, "seed": 3}
    one, three = (told(ATDSDataset(path, 7, FEATURES, num_parallel_calls=threads, **options)) for threads in (1, 3))
    assert one == three


def test_thousands_of_damaged_blocks_end_soon(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", 0, 2000, range(2000), per_block=2)
    for shuffle in (0, 100):
        dataset = ATDSDataset(path, 16, FEATURES, shuffle_buffer_size=shuffle)
        assert batches(dataset.ignore_errors()) == []


def test_other_datasets_of_an_interleave_continue(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.avro", 20 * i, 20 * i + 20, {20 * i + 7}) for i in range(4)]
    dataset = tf.data.Dataset.from_tensor_slices(paths).interleave(
        lambda path: ATDSDataset(path, 5, FEATURES).ignore_errors(), cycle_length=2, num_parallel_calls=2
    )
    expected = [i for i in range(80) if i % 20 // 5 != 1]
    assert sorted(i for batch in batches(dataset) for i in batch) == expected
    outside = tf.data.Dataset.from_tensor_slices(paths).interleave(lambda path: ATDSDataset(path, 5, FEATURES))
    assert sorted(i for batch in batches(outside.ignore_errors()) for i in batch) == expected


def truncated(data: bytes) -> bytes:
    return data[:-20]


def without_marker(data: bytes) -> bytes:
    return data[:-16] + bytes(16)


def without_magic(data: bytes) -> bytes:
    return b"no" + data


@pytest.mark.parametrize(
    ("damage", "sound"), [(truncated, range(15)), (without_marker, range(15)), (without_magic, range(0))]
)
@pytest.mark.parametrize("shuffle", [0, 10])
def test_rows_before_damage_are_read(
    tmp_path: Path, damage: Callable[[bytes], bytes], sound: range, shuffle: int
) -> None:
    paths = [write(tmp_path / f"{i}.avro", 20 * i, 20 * i + 20) for i in range(3)]
    for i in (0, 2):
        Path(paths[i]).write_bytes(damage(Path(paths[i]).read_bytes()))
    dataset = ATDSDataset(paths, 4, FEATURES, shuffle_buffer_size=shuffle)
    found = told(dataset)
    assert found[:2] == [INVALID, INVALID]
    rows = sorted(i for batch in found[2:] for i in batch)
    assert rows == [*sound, *range(20, 40), *(40 + i for i in sound)]
    assert sorted(i for batch in batches(dataset.ignore_errors()) for i in batch) == rows
    alone = ATDSDataset(paths[0], 4, FEATURES)
    assert [i for batch in batches(alone.ignore_errors()) for i in batch] == list(sound)
    assert len(batches(alone.repeat(3).ignore_errors())) == 3 * len(batches(alone.ignore_errors()))


@pytest.mark.parametrize("case", ["missing", "schema", "no files", "all headers damaged"])
def test_unrecoverable_errors_end_the_iteration(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "a.avro", 0, 10)
    files, features = [path], FEATURES
    error = INVALID
    if case == "missing":
        files, error = [path, str(tmp_path / "nowhere.avro")], "NotFoundError"
    elif case == "schema":
        features = {"absent": DenseFeature([], tf.int64)}
    elif case == "no files":
        files = tf.constant([], tf.string)
    else:
        Path(path).write_bytes(b"nonsense")
    dataset = ATDSDataset(files, 2, features)
    assert told(dataset) == [error]
    assert batches(dataset.ignore_errors()) == []
    assert batches(dataset.repeat().ignore_errors()) == []


def test_an_error_ends_an_iteration_over_a_reader(tmp_path: Path) -> None:
    reader = fastpipe.read_avro(
        write(tmp_path / "a.avro", 0, 10, {5}, per_block=2),
        features={name: fastpipe.DenseSpec((), dtype) for name, dtype in (("id", "int64"), ("score", "float32"))},
        batch_size=2,
    )
    dataset = fastpipe.tf.dataset(reader)
    for _ in range(2):
        reader.set_epoch(0)
        assert told(dataset) == [[0, 1], [2, 3], INVALID]
        # The state points to the error and not to the end, so loading it leads to the error again.
        assert reader.state_dict()["progress"]["step"] == 2
    reader.set_epoch(0)
    assert batches(dataset.ignore_errors()) == [[0, 1], [2, 3]]


def test_ctrl_c_while_an_iteration_begins_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = atds._Source._start

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return begin(*args)

    monkeypatch.setattr(atds._Source, "_start", interrupted)
    dataset = ATDSDataset(write(tmp_path / "a.avro", 0, 10), 2, FEATURES)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            batches(dataset.ignore_errors())
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_ctrl_c_ends_a_loop_that_ignores_errors(tmp_path: Path) -> None:
    code = f"""
        import signal
        from fastpipe.tf.atds import ATDSDataset, DenseFeature
        import tensorflow as tf

        signal.signal(signal.SIGINT, signal.default_int_handler)
        features = {{"id": DenseFeature([], tf.int64), "score": DenseFeature([], tf.float32)}}
        dataset = ATDSDataset({write(tmp_path / "a.avro", 0, 10, {5})!r}, 2, features)
        for number, batch in enumerate(dataset.ignore_errors().repeat()):
            if number == 20:
                print("at work", flush=True)
    """
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "at work\n"
            processes.press_until_ended(child)
        finally:
            child.kill()
    assert child.returncode == -signal.SIGINT
