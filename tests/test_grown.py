"""Resuming from a saved state after files were added to the dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import samples
import tfrecords

BLOCKS = (4, 1, 6)


class Source:
    """Files of one format with a column `id`."""

    def __init__(self, format_: str, folder: Path) -> None:
        self.format, self.folder = format_, folder
        self.function = {
            "avro": fastpipe.read_avro,
            "csv": fastpipe.read_csv,
            "parquet": fastpipe.read_parquet,
            "arrow": fastpipe.read_arrow,
            "tfrecord": fastpipe.read_tfrecord,
        }[format_]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.{self.format}"

    def make(self, names: list[str], first: int, when: int, blocks: Sequence[int] = BLOCKS) -> list[int]:
        """Writes files of a few blocks. Returns their rows."""
        ids = []
        for name in names:
            ends = np.cumsum([first, *blocks]).tolist()
            self._write(self.path(name), [range(*ends) for ends in pairwise(ends)])
            os.utime(self.path(name), (when, when))
            ids += range(first, ends[-1])
            first = ends[-1]
        return ids

    def _write(self, path: Path, blocks: list[range]) -> None:
        if self.format == "avro":
            encoded = [(len(rows), b"".join(samples.encoded(i, i % 5) for i in rows)) for rows in blocks]
            path.write_bytes(samples.wire.container(samples.SCHEMA, encoded))
            return
        if self.format == "csv":
            path.write_text("".join(f"{line}\n" for line in ["id", *(i for rows in blocks for i in rows)]))
            return
        if self.format == "tfrecord":
            path.write_bytes(tfrecords.file({"id": i} for rows in blocks for i in rows))
            return
        pa = pytest.importorskip("pyarrow")
        tables = [pa.table({"id": pa.array(rows, pa.int64())}) for rows in blocks]
        if self.format == "parquet":
            with pytest.importorskip("pyarrow.parquet").ParquetWriter(path, tables[0].schema) as writer:
                for table in tables:
                    writer.write_table(table)
            return
        with pa.ipc.new_file(path, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)

    def read(self, **options: Any) -> fastpipe.Reader:
        return self.function(self.folder, features=samples.ONLY_ID, **options)


@pytest.fixture(params=["avro", "csv", "parquet", "arrow", "tfrecord"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return Source(request.param, tmp_path)


@pytest.mark.parametrize("shuffle", samples.SHUFFLES)
@pytest.mark.parametrize("added", [["c", "d"], ["aa", "c"]], ids=["after", "between"])
def test_the_current_epoch_ends_with_the_old_files(source: Source, shuffle: Any, added: Any) -> None:
    options = samples.order_of(shuffle)
    old = source.make(["a", "b"], 0, 1_000)
    before = source.read(**options)
    whole = [samples.ids_of([batch]) for batch in before]
    again = source.read(**options)
    states = [again.state_dict()]
    for _ in (passed := iter(again)):
        states.append(samples.through_json(again.state_dict()))
    assert list(passed) == []
    states.append(again.state_dict())
    new = source.make(added, len(old), 2_000)
    fresh = source.read(**options)
    later = {}
    for epoch in (0, 1):
        fresh.set_epoch(epoch)
        later[epoch] = samples.ids_of(fresh)
    for step, state in enumerate(states):
        reader = source.read(**options)
        with pytest.raises(fastpipe.errors.StateError):
            reader.load_state_dict(state)
        growth = reader.resume_appended(state)
        assert growth.added_files == [str(source.path(name)) for name in added]
        assert growth.added_rows == len(new)
        if step == 0 or step >= len(whole):
            assert growth.begun is None
            epoch = 0 if step == 0 else 1
        else:
            assert growth.begun is not None
            assert [samples.ids_of([batch]) for batch in growth.begun] == whole[step:]
            epoch = 1
        assert reader.epoch == epoch
        assert samples.ids_of(reader) == later[epoch]
        assert set(later[epoch]) == {*old, *new}
        assert reader.epoch == epoch + 1


def test_resuming_again_after_more_growth(source: Source) -> None:
    options = samples.order_of(True)
    source.make(["a", "b"], 0, 1_000)
    first = source.read(**options)
    whole = samples.ids_of(source.read(**options))
    batches = iter(first)
    seen = samples.ids_of([next(batches)])
    state = first.state_dict()
    for number in range(3):
        source.make([f"new{number}"], 100 * (number + 1), 2_000 + number)
        growth = source.read(**options).resume_appended(state)
        assert growth.begun is not None
        assert len(growth.added_files) == number + 1
        if number < 2:
            seen += samples.ids_of([next(iter(growth.begun))])
            state = growth.begun.state_dict()
    assert growth.begun is not None
    assert seen + samples.ids_of(growth.begun) == whole
    done = source.read(**options).resume_appended(growth.begun.state_dict())
    assert done.begun is None


def test_several_epochs_and_ranks(source: Source) -> None:
    source.make(["a", "b"], 0, 1_000)
    options = {**samples.order_of(True), "epochs": 3}
    reader = source.read(**options)
    batches = iter(reader)
    count = len(reader) // 3
    for _ in range(count + 2):
        next(batches)
    state = reader.state_dict()
    rest = samples.ids_of(next(batches) for _ in range(count - 2))
    source.make(["c"], 100, 2_000)
    ranks = [source.read(**options, rank=rank, world_size=2, on_uneven="allow") for rank in range(2)]
    growths = [rank.resume_appended(state) for rank in ranks]
    assert sorted(i for growth in growths for i in samples.ids_of(growth.begun or [])) == sorted(rest)
    assert [rank.epoch for rank in ranks] == [2, 2]


def test_without_growth_it_is_load_state_dict(source: Source) -> None:
    source.make(["a", "b"], 0, 1_000)
    options = samples.order_of(True)
    reader = source.read(**options)
    whole = samples.ids_of(source.read(**options))
    seen = samples.ids_of([next(iter(reader))])
    again = source.read(**options)
    assert again.resume_appended(reader.state_dict()) == fastpipe.typing.Growth(None, [], 0)
    assert seen + samples.ids_of(again) == whole


def test_a_drawn_seed_is_restored(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    source.make(["a"], 0, 1_000)
    reader = source.read(batch_size=3, shuffle=True)
    next(iter(reader))
    source.make(["b"], 100, 2_000)
    again = source.read(batch_size=3, shuffle=True)
    with caplog.at_level(logging.INFO, "fastpipe"):
        growth = again.resume_appended(reader.state_dict())
    assert growth.begun is not None
    assert again.seed == growth.begun.seed == reader.seed
    assert samples.ids_of(again) == samples.ids_of(
        b for b in _at(source.read(batch_size=3, shuffle=True, seed=reader.seed), 1)
    )
    assert "1 files with 11 rows were added; they are read from epoch 1 on" in caplog.text


def _at(reader: fastpipe.Reader, epoch: int) -> fastpipe.Reader:
    reader.set_epoch(epoch)
    return reader


def test_changes_other_than_growth_are_rejected(source: Source) -> None:
    source.make(["a", "b"], 0, 1_000)
    options = samples.order_of(True)
    reader = source.read(**options)
    next(iter(reader))
    state = reader.state_dict()
    source.make(["c"], 100, 2_000)
    damaged = {**state, "data": {**state["data"], "digest": "0"}}
    for wrong in (damaged, samples.sealed(damaged), {}, {"data": 3}, {**state, "version": 99}):
        with pytest.raises(fastpipe.errors.StateError):
            source.read(**options).resume_appended(wrong)
    with pytest.raises(fastpipe.errors.StateError, match="batch_size"):
        source.read(**{**options, "batch_size": 5}).resume_appended(state)
    with pytest.raises(TypeError):
        source.read(**options).resume_appended(3)  # type: ignore[arg-type]
    source.make(["b"], 11, 1_000, [4, 1, 7])
    changed = source.read(**options)
    with pytest.raises(fastpipe.errors.StateError, match="are missing or changed"):
        changed.resume_appended(state)
    assert changed.epoch == 0
    for name in ("b", "c"):
        source.path(name).unlink()
    with pytest.raises(fastpipe.errors.StateError, match="files are missing"):
        source.read(**options).resume_appended(state)


def test_a_window_that_was_chosen_is_kept(source: Source) -> None:
    source.make(["a", "b"], 0, 1_000)
    for buffer in (None, 22, 33):
        # 22 and 33 are also the numbers of rows of the old files and of all files.
        options = {"batch_size": 3, "shuffle": True, "seed": 5, "shuffle_buffer": buffer}
        before = source.read(**options)
        whole = samples.ids_of(source.read(**options))
        seen = samples.ids_of([next(iter(before))])
        source.make(["c"], 22, 2_000)
        growth = source.read(**options).resume_appended(before.state_dict())
        assert growth.begun is not None
        assert seen + samples.ids_of(growth.begun) == whole
        source.path("c").unlink()


def test_other_sources_say_what_to_do() -> None:
    arrays = fastpipe.from_arrays({"id": np.arange(5)}, batch_size=2)
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"needs a reader of files.*load_state_dict\(\)"):
        arrays.resume_appended(arrays.state_dict())
