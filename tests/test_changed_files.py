"""Files that change after a state was saved, while they are read, and while features are inferred."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import samples
import wire
from fastpipe import _fastpipe
from fastpipe._files._in_memory_files import lowered
from samples import SHUFFLES, sealed

SCHEMA = wire.record("R", id="long")
ID = samples.ONLY_ID
BEFORE, AFTER = 1_600_000_000_000_000_000, 1_600_000_000_000_000_001


def content(sizes: list[int], first: int = 0) -> bytes:
    """Returns a file of blocks with these row counts. Every id is encoded in two bytes."""
    ids = itertools.count(100 + first)
    return wire.container(SCHEMA, [(rows, wire.longs(*itertools.islice(ids, rows))) for rows in sizes])


def write(path: Path, data: bytes, modified: int = BEFORE) -> Path:
    """Overwrites a file in place."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate()
    os.utime(path, ns=(modified, modified))
    return path


def order_of(shuffle: Any) -> dict[str, Any]:
    order: dict[str, Any] = {"batch_size": 10, "features": ID, "prefetch": 1, "num_threads": 1}
    return order | ({"shuffle": shuffle, "seed": 3, "shuffle_buffer": 20} if shuffle else {})


# --- After a state was saved ---


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_state_is_rejected_if_blocks_changed(tmp_path: Path, shuffle: Any) -> None:
    path = write(tmp_path / "x.avro", content([20, 30, 50]))
    size = path.stat().st_size
    reader = fastpipe.read_avro(path, **order_of(shuffle))
    next(iter(reader))
    state = reader.state_dict()
    reader.close()
    fastpipe.read_avro(path, **order_of(shuffle)).load_state_dict(json.loads(json.dumps(state)))
    # Size, row count, name and sync marker are equal.
    write(path, content([30, 20, 50]))
    assert path.stat().st_size == size
    with pytest.raises(fastpipe.errors.StateError, match=r"different contents \(sync markers or blocks\)"):
        fastpipe.read_avro(path, **order_of(shuffle)).load_state_dict(state)


def test_states_of_version_1_do_not_check_blocks(tmp_path: Path) -> None:
    """Such states load if the properties that they record match."""
    path = write(tmp_path / "x.avro", content([20, 30, 50]))
    reader = fastpipe.read_avro(path, **order_of(False))
    assert reader._data.fingerprint(1) != reader._data.fingerprint()
    state = sealed(reader.state_dict() | {"version": 1, "data": reader._data.fingerprint(1)})
    for sizes in ([20, 30, 50], [30, 20, 50]):
        write(path, content(sizes))
        fastpipe.read_avro(path, **order_of(False)).load_state_dict(state)
    write(path, content([20, 30, 50]).replace(wire.SYNC, bytes(16)))
    with pytest.raises(fastpipe.errors.StateError, match="different contents"):
        fastpipe.read_avro(path, **order_of(False)).load_state_dict(state)


def test_the_digest_of_blocks_is_stable(tmp_path: Path) -> None:
    """States contain the digest, so it must not change between versions."""
    path = write(tmp_path / "x.avro", content([20, 30, 50]))
    assert fastpipe.read_avro(path, batch_size=1)._data.fingerprint()["digest"] == DIGEST


DIGEST = "d921c27a18788ba1aa3d91935bc8f299"


@pytest.mark.parametrize("shape", [list, dict])
def test_a_deeply_nested_state_is_rejected(tmp_path: Path, shape: type) -> None:
    reader = fastpipe.read_avro(write(tmp_path / "x.avro", content([20])), batch_size=1)
    nested: Any = 0
    for _ in range(100_000):
        nested = [nested] if shape is list else {"x": nested}
    with pytest.raises(fastpipe.errors.StateError, match="nested too deeply"):
        reader.load_state_dict(reader.state_dict() | {"more": nested})


# --- During a read ---


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("files", [1, 3])
def test_modifying_a_file_during_a_read_is_an_error(tmp_path: Path, shuffle: Any, files: int) -> None:
    paths = [write(tmp_path / f"{i}.avro", content([10] * 20, 200 * i)) for i in range(files)]
    reader = fastpipe.read_avro(paths, **order_of(shuffle))
    batches = iter(reader)
    for _ in range(5):
        next(batches)
    # The layout and size are equal, but the ids differ.
    write(paths[0], content([10] * 20, 1000), AFTER)
    with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read: it was modified") as error:
        for _ in batches:
            pass
    assert error.value.path == str(paths[0])
    with pytest.raises(fastpipe.errors.StorageError):
        next(batches)
    assert sum(len(batch["id"]) for batch in fastpipe.read_avro(paths, **order_of(shuffle))) == 200 * files


def test_a_change_is_reported_before_the_pass_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", content([10] * 20))
    reader = fastpipe.read_avro(path, **order_of(False) | {"prefetch": 50, "batch_size": 100})
    batches = iter(reader)
    next(batches)
    write(path, content([10] * 20, 1000), AFTER)
    with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read"):
        next(batches), next(batches, None)


def test_an_endless_pass_reports_a_change_in_the_next_epoch(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", content([10] * 20))
    reader = fastpipe.read_avro(path, **order_of(True), epochs=None)
    batches = iter(reader)
    next(batches)
    write(path, content([10] * 20, 1000), AFTER)
    with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read"):
        for _ in itertools.islice(batches, 100):
            pass


def test_more_files_than_stay_open(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i:02}.avro", content([10], 10 * i)) for i in range(50)]
    reader = fastpipe.read_avro(paths, **order_of(False))
    batches = iter(reader)
    next(batches)
    write(paths[0], content([10], 1000), AFTER)
    with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read") as error:
        for _ in batches:
            pass
    assert (error.value.path, error.value.block) == (str(paths[0]), None)


def test_a_file_that_changed_before_a_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", content([10] * 20))
    reader = fastpipe.read_avro(path, **order_of(False))
    assert len(list(reader)) == 20
    # A different file with the same name.
    other = write(tmp_path / "y.avro", content([10] * 20, 1000), AFTER)
    other.replace(path)
    for read in (lambda: next(iter(reader)), lambda: reader.batch_at(3)):
        with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read") as error:
            read()
        assert error.value.path == str(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-50], "changed while it was read: it became shorter"),
        (lambda data: data[:-400] + bytes(400), "changed while it was read: it was modified"),
        (lambda data: data.replace(wire.SYNC, wire.SYNC[::-1]), "changed while it was read: it was modified"),
        (lambda data: data[: len(wire.header(SCHEMA))] + b"\x7f" * 300, "changed while it was read: it has"),
    ],
)
def test_apparent_damage_is_reported_as_a_change(tmp_path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    data = content([10] * 20)
    path = write(tmp_path / "x.avro", data)
    batches = iter(fastpipe.read_avro(path, **order_of(False)))
    next(batches)
    write(path, change(data), AFTER)
    with pytest.raises(fastpipe.errors.StorageError, match=words) as error:
        for _ in batches:
            pass
    assert error.value.path == str(path)


def test_damage_without_a_change_is_reported_as_damage(tmp_path: Path) -> None:
    data = content([10] * 20)
    path = write(tmp_path / "x.avro", data[:-100] + b"\xff" * 4 + data[-96:])
    with pytest.raises(fastpipe.errors.MalformedFileError) as error:
        list(fastpipe.read_avro(path, **order_of(False)))
    assert error.value.block is not None


# --- During inference ---

LISTS = wire.record("R", x=wire.list_of("int"))


def lists(sizes: list[int]) -> bytes:
    return wire.container(LISTS, [(size, wire.array(*map(wire.long, (1, 2, 3))) * size) for size in sizes])


def inferred(path: Path, meanwhile: Callable[[], object]) -> Any:
    """Infers the features of a file, and calls `meanwhile` after the file is indexed."""
    dataset = _fastpipe.AvroDataset(lowered([str(path)]), None, check=lambda path, schema: meanwhile() and None)
    return dataset.features()


def test_inference_looks_at_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", lists([20, 20]))
    assert inferred(path, lambda: None) == [("x", "dense", [3], "int32", "error", None)]


def test_inference_raises_storage_errors(tmp_path: Path) -> None:
    data = lists([20, 20])
    path = write(tmp_path / "x.avro", data)
    with pytest.raises(fastpipe.errors.MissingFileError):
        inferred(path, path.unlink)
    write(path, data)
    for changed in (data[:-50], data[:-50] + bytes(50), lists([20, 20])):
        with pytest.raises(fastpipe.errors.StorageError, match="changed while it was read"):
            inferred(path, lambda data=changed: write(path, data, AFTER))
        write(path, data)


def test_inference_logs_the_damage_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = [(20, wire.array(*map(wire.long, (1, 2, 3))) * 20)] * 2
    damaged = [(20, b"\xff" * 100)] * 5
    path = write(tmp_path / "x.avro", wire.container(LISTS, [*blocks, *damaged]))
    with caplog.at_level(logging.WARNING, "fastpipe"):
        assert fastpipe.infer_features(path) == {"x": fastpipe.DenseSpec((3,), "int32")}
    texts = [record.getMessage() for record in caplog.records if record.name == "fastpipe"]
    assert len(texts) == 4
    assert all(
        "inferring features without a damaged block" in text and str(path) in text and f"block {2 + i}" in text
        for i, text in enumerate(texts[:3])
    )
    assert texts[3].startswith("2 more damaged blocks")
