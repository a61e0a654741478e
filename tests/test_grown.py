"""Resuming from a saved state after files were added to the dataset."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import samples


def make(folder: Path, names: list[str], first: int, when: int) -> list[int]:
    """Writes files of a few blocks. Returns their rows."""
    ids = []
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        blocks = []
        for rows in (4, 1, 6):
            new = range(first, first + rows)
            blocks.append((rows, b"".join(samples.encoded(i, i % 5) for i in new)))
            ids += new
            first += rows
        path.write_bytes(samples.wire.container(samples.SCHEMA, blocks))
        os.utime(path, (when, when))
    return ids


def read(folder: Path, **options: Any) -> fastpipe.Reader:
    return fastpipe.read_avro(folder, features=samples.ONLY_ID, **options)


@pytest.mark.parametrize("shuffle", samples.SHUFFLES)
@pytest.mark.parametrize("added", [["c.avro", "d.avro"], ["aa.avro", "c.avro"]], ids=["after", "between"])
def test_the_current_epoch_ends_with_the_old_files(tmp_path: Path, shuffle: Any, added: Any) -> None:
    options = samples.order_of(shuffle)
    old = make(tmp_path, ["a.avro", "b.avro"], 0, 1_000)
    before = read(tmp_path, **options)
    whole = [samples.ids_of([batch]) for batch in before]
    again = read(tmp_path, **options)
    states = [again.state_dict()]
    for _ in (passed := iter(again)):
        states.append(samples.through_json(again.state_dict()))
    assert list(passed) == []
    states.append(again.state_dict())
    new = make(tmp_path, added, len(old), 2_000)
    fresh = read(tmp_path, **options)
    later = {}
    for epoch in (0, 1):
        fresh.set_epoch(epoch)
        later[epoch] = samples.ids_of(fresh)
    for step, state in enumerate(states):
        reader = read(tmp_path, **options)
        with pytest.raises(fastpipe.errors.StateError):
            reader.load_state_dict(state)
        growth = reader.resume_appended(state)
        assert growth.added_files == [str(tmp_path / name) for name in added]
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


def test_resuming_again_after_more_growth(tmp_path: Path) -> None:
    options = samples.order_of(True)
    make(tmp_path, ["a.avro", "b.avro"], 0, 1_000)
    first = read(tmp_path, **options)
    whole = samples.ids_of(read(tmp_path, **options))
    batches = iter(first)
    seen = samples.ids_of([next(batches)])
    state = first.state_dict()
    for number in range(3):
        make(tmp_path, [f"new{number}.avro"], 100 * (number + 1), 2_000 + number)
        growth = read(tmp_path, **options).resume_appended(state)
        assert growth.begun is not None
        assert len(growth.added_files) == number + 1
        if number < 2:
            seen += samples.ids_of([next(iter(growth.begun))])
            state = growth.begun.state_dict()
    assert growth.begun is not None
    assert seen + samples.ids_of(growth.begun) == whole
    done = read(tmp_path, **options).resume_appended(growth.begun.state_dict())
    assert done.begun is None


def test_several_epochs_and_ranks(tmp_path: Path) -> None:
    make(tmp_path, ["a.avro", "b.avro"], 0, 1_000)
    options = {**samples.order_of(True), "epochs": 3}
    reader = read(tmp_path, **options)
    batches = iter(reader)
    count = len(reader) // 3
    for _ in range(count + 2):
        next(batches)
    state = reader.state_dict()
    rest = samples.ids_of(next(batches) for _ in range(count - 2))
    make(tmp_path, ["c.avro"], 100, 2_000)
    ranks = [read(tmp_path, **options, rank=rank, world_size=2, on_uneven="allow") for rank in range(2)]
    growths = [rank.resume_appended(state) for rank in ranks]
    assert sorted(i for growth in growths for i in samples.ids_of(growth.begun or [])) == sorted(rest)
    assert [rank.epoch for rank in ranks] == [2, 2]


def test_without_growth_it_is_load_state_dict(tmp_path: Path) -> None:
    make(tmp_path, ["a.avro", "b.avro"], 0, 1_000)
    options = samples.order_of(True)
    reader = read(tmp_path, **options)
    whole = samples.ids_of(read(tmp_path, **options))
    seen = samples.ids_of([next(iter(reader))])
    again = read(tmp_path, **options)
    assert again.resume_appended(reader.state_dict()) == fastpipe.typing.Growth(None, [], 0)
    assert seen + samples.ids_of(again) == whole


def test_a_drawn_seed_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, ["a.avro"], 0, 1_000)
    reader = read(tmp_path, batch_size=3, shuffle=True)
    next(iter(reader))
    make(tmp_path, ["b.avro"], 100, 2_000)
    again = read(tmp_path, batch_size=3, shuffle=True)
    with caplog.at_level(logging.INFO, "fastpipe"):
        growth = again.resume_appended(reader.state_dict())
    assert growth.begun is not None
    assert again.seed == growth.begun.seed == reader.seed
    assert samples.ids_of(again) == samples.ids_of(
        b for b in _at(read(tmp_path, batch_size=3, shuffle=True, seed=reader.seed), 1)
    )
    assert "1 files with 11 rows were added; they are read from epoch 1 on" in caplog.text


def _at(reader: fastpipe.Reader, epoch: int) -> fastpipe.Reader:
    reader.set_epoch(epoch)
    return reader


def test_changes_other_than_growth_are_rejected(tmp_path: Path) -> None:
    make(tmp_path, ["a.avro", "b.avro"], 0, 1_000)
    options = samples.order_of(True)
    reader = read(tmp_path, **options)
    next(iter(reader))
    state = reader.state_dict()
    make(tmp_path, ["c.avro"], 100, 2_000)
    damaged = {**state, "data": {**state["data"], "digest": "0"}}
    for wrong in (damaged, samples.sealed(damaged), {}, {"data": 3}, {**state, "version": 99}):
        with pytest.raises(fastpipe.errors.StateError):
            read(tmp_path, **options).resume_appended(wrong)
    with pytest.raises(fastpipe.errors.StateError, match="batch_size"):
        read(tmp_path, **{**options, "batch_size": 5}).resume_appended(state)
    with pytest.raises(TypeError):
        read(tmp_path, **options).resume_appended(3)  # type: ignore[arg-type]
    make(tmp_path, ["b.avro"], 50, 1_000)
    changed = read(tmp_path, **options)
    with pytest.raises(fastpipe.errors.StateError, match="are missing or changed"):
        changed.resume_appended(state)
    assert changed.epoch == 0
    for name in ("b.avro", "c.avro"):
        (tmp_path / name).unlink()
    with pytest.raises(fastpipe.errors.StateError, match="files are missing"):
        read(tmp_path, **options).resume_appended(state)
    arrays = fastpipe.from_arrays({"id": samples.np.arange(5)}, batch_size=2)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="Avro files"):
        arrays.resume_appended(arrays.state_dict())
