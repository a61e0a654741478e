"""Selections of rows from every source, in every order: a selection is a dataset of only these rows."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import samples
from every_source import ORDERS, ROWS, Make, digests, make, order
from fastpipe._reader.selection import select
from processes import printed

# The fixture that makes readers of each source.
__all__ = ["make"]

Mask = npt.NDArray[np.bool_]


def masks() -> dict[str, Mask]:
    draw = np.random.default_rng(5)
    index = np.arange(ROWS)
    return {
        "half": draw.random(ROWS) < 0.5,
        "few": draw.random(ROWS) < 0.05,
        "middle": (index >= 70) & (index < 180),
        "all but one": index != 100,
        "one": index == ROWS - 1,
        "all": index >= 0,
    }


@pytest.fixture(scope="module")
def whole(make: Make) -> dict[str, Any]:
    """Returns all rows of a source as a batch."""
    return make(batch_size=ROWS, seed=3).batch_at(0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., fastpipe.Reader]:
    """Returns a function that reads the numbers 0 to n - 1 from Avro blocks with the given numbers of rows."""
    folder = tmp_path_factory.mktemp("references")
    # Files without blocks have no rows, so each file has at least one block.
    write = functools.cache(lambda blocks: samples.write(folder, [blocks]))
    return lambda blocks, **options: write(tuple(blocks)).read(features=samples.ONLY_ID, **options)


def selection(make: Make, mask: Mask, **options: Any) -> fastpipe.Reader:
    return select(make(**{"seed": 3} | options), mask)


def sizes(reader: fastpipe.Reader) -> list[int]:
    return reader._data.unsliced().handle.unit_rows().tolist()


def rows_of(reader: fastpipe.Reader) -> list[list[int]]:
    return [batch["id"].tolist() for batch in reader]


def expected(whole: dict[str, Any], mask: Mask, batches: list[list[int]]) -> list[str]:
    """Returns the digests of batches, whose rows are indices among the selected rows."""
    chosen = np.flatnonzero(mask)
    return digests({name: values[chosen[rows]] for name, values in whole.items()} for rows in batches)


@order
def test_a_selection_is_a_dataset_of_its_rows(
    make: Make, whole: dict[str, Any], reference: Callable[..., fastpipe.Reader], order: dict[str, Any]
) -> None:
    full = make(batch_size=ROWS, seed=3)
    turn = ORDERS.index(order)
    for mask in [masks()["half"], *itertools.islice(itertools.cycle(masks().values()), 1 + 2 * turn, 3 + 2 * turn)]:
        options = {"batch_size": 16, "seed": 3} | order
        reader = selection(make, mask, **options)
        like = reference(sizes(reader), **options)
        rows = rows_of(like)
        assert (reader.num_rows, len(reader)) == (int(mask.sum()), len(like))
        assert digests(reader) == expected(whole, mask, rows)
        assert digests(reader.batch_at(step, epoch=0) for step in range(len(reader))) == expected(whole, mask, rows)
        chosen = np.flatnonzero(mask)
        for step, at in itertools.product((0, len(rows) - 1), (0, -1)):
            slot = at % len(rows[step])
            assert reader.locate(step, slot, 0) == full.locate(0, int(chosen[rows[step][slot]]))


@order
def test_ranks_share_a_selection(
    make: Make, whole: dict[str, Any], reference: Callable[..., fastpipe.Reader], order: dict[str, Any]
) -> None:
    mask = masks()["half"]
    if "user" in whole:
        whole = {"user": whole["user"]}  # The drawn negatives depend on ranks.
    for ranks in (2, 3):
        for rank in range(ranks):
            options = {"batch_size": 8, "seed": 3, "rank": rank, "world_size": ranks, "on_uneven": "allow"} | order
            reader = selection(make, mask, **options)
            rows = rows_of(reference(sizes(reader), **options))
            assert digests({name: batch[name] for name in whole} for batch in reader) == expected(whole, mask, rows)


@order
def test_a_state_resumes_at_every_step(make: Make, order: dict[str, Any]) -> None:
    mask = masks()["half"]
    reader = selection(make, mask, batch_size=32, **order)
    whole = digests(reader)
    reader.set_epoch(0)
    batches, states = iter(reader), [reader.state_dict()]
    states.extend(reader.state_dict() for _ in batches)
    for threads in (1, 3):
        again = selection(make, mask, batch_size=32, num_threads=threads, **order)
        for step, state in enumerate(states):
            again.load_state_dict(json.loads(json.dumps(state)))
            assert digests(again) == whole[step:]
    # The rolled mask has as many rows.
    others = [selection(make, other, batch_size=32, **order) for other in (~mask, np.roll(mask, 1))]
    for other in (make(batch_size=32, **{"seed": 3} | order), *others):
        with pytest.raises(fastpipe.errors.StateError):
            other.load_state_dict(states[1])


def test_selections_compose(make: Make) -> None:
    mask = masks()["half"]
    reader = selection(make, mask, batch_size=8, shuffle=True, shuffle_buffer=32)
    inner = np.arange(mask.sum()) % 3 == 0
    twice, both = select(reader, inner), np.flatnonzero(mask)[inner]
    once = selection(make, np.isin(np.arange(ROWS), both), batch_size=8, shuffle=True, shuffle_buffer=32)
    whole = digests(twice)
    assert digests(once) == whole
    for options in ({"num_threads": 1}, {"num_threads": 4, "prefetch": 1}, {"memory_limit": "64MB"}):
        assert (
            digests(select(selection(make, mask, batch_size=8, shuffle=True, shuffle_buffer=32, **options), inner))
            == whole
        )
    assert twice._data.fingerprint() == once._data.fingerprint()
    assert reader.without(rows=[]).num_rows == reader.num_rows
    assert "of 240 rows of" in repr(twice) or "part" in repr(twice)


@order
def test_rows_taken_several_times(
    make: Make, whole: dict[str, Any], reference: Callable[..., fastpipe.Reader], order: dict[str, Any]
) -> None:
    rows = np.random.default_rng(ORDERS.index(order)).integers(0, ROWS, 150)
    options = {"batch_size": 16, "seed": 3} | order
    full, chosen = make(batch_size=ROWS, seed=3), np.sort(rows) if order else rows
    for threads in (1, 3):
        reader = make(**options, num_threads=threads).take(rows)
        batches = rows_of(reference(sizes(reader), **options))
        found = digests({name: values[chosen[at]] for name, values in whole.items()} for at in batches)
        assert digests(reader) == found
        assert digests(reader.batch_at(step, epoch=0) for step in range(len(reader))) == found
        for step in (0, len(reader) - 1):
            assert reader.locate(step, 1, 0) == full.locate(0, int(chosen[batches[step][1]]))
        reader.set_epoch(0)
        states = [reader.state_dict(), *(reader.state_dict() for _ in reader)]
        for step, state in enumerate(states):
            reader.load_state_dict(json.loads(json.dumps(state)))
            assert digests(reader) == found[step:]


def test_repeated_rows_in_sequence(make: Make, whole: dict[str, Any]) -> None:
    rows = np.repeat(np.arange(ROWS), np.random.default_rng(1).integers(0, 4, ROWS))
    for threads, size in ((1, 7), (3, 50)):
        reader = make(batch_size=size, num_threads=threads, seed=3).take(rows)
        found = digests(reader)
        batches = [rows[at : at + size] for at in range(0, len(rows), size)]
        if "user" not in whole:  # Negatives are drawn by the step.
            assert found == digests({name: values[at] for name, values in whole.items()} for at in batches)
        reader.set_epoch(0)
        states = [reader.state_dict() for _ in reader]
        for step in range(0, len(states), 3):
            reader.load_state_dict(states[step])
            assert digests(reader) == found[step + 1 :]
        for ranks in (2, 3):
            parts = [
                make(batch_size=size, seed=3, rank=rank, world_size=ranks, on_uneven="allow").take(rows)
                for rank in range(ranks)
            ]
            assert sum(len(next(iter(batch.values()))) for part in parts for batch in part) == len(rows)


def test_selections_are_pickled(make: Make) -> None:
    reader = selection(make, masks()["few"], batch_size=4, shuffle=True, shuffle_buffer=32)
    again = pickle.loads(pickle.dumps(reader))
    assert again.state_dict() == reader.state_dict()
    assert digests(again) == digests(reader)


FORKS = """
import os, sys, fastpipe

def ids(reader):
    reader.set_epoch(0)
    return [int(i) for batch in reader for i in batch["id"]]

reader = fastpipe.read_avro(sys.argv[1], columns=["id"], batch_size=7, shuffle=True, seed=1).split(0.5, 0.5)[0]
here = ids(reader)
child = os.fork()
if child == 0:
    os._exit(0 if ids(reader) == here else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ids(reader) == here
"""


def test_selections_are_read_in_a_forked_child(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 12])
    program = tmp_path / "program.py"
    program.write_text(FORKS)
    printed(str(program), data.paths[0])


def test_partitions_samples_and_streams_of_a_selection(make: Make, whole: dict[str, Any]) -> None:
    mask = masks()["middle"]
    reader = selection(make, mask, batch_size=ROWS)
    chosen = np.flatnonzero(mask)
    parts = reader.partition(4)
    assert all(part.rows for part in parts)
    assert (parts[0].start, parts[-1].stop) == (0, len(sizes(reader)))
    places = []
    for part in parts:
        partition = reader.read_partition(part)
        places += [partition.locate(0, row) for row in range(partition.num_rows)]
        assert sum(len(next(iter(batch.values()))) for batch in partition) == part.rows
    full = make(batch_size=ROWS, seed=3)
    assert places == [full.locate(0, int(row)) for row in chosen]
    taken = reader.take([0, 50, 109])
    assert digests(taken) == expected(whole, mask, [[0, 50, 109]])
    assert reader.sample(30, seed=1).num_rows == 30
    assert digests(taken.without(rows=[0])) == expected(whole, mask, [[50, 109]])
    pa = pytest.importorskip("pyarrow")
    assert pa.table(reader).num_rows == len(chosen)


def test_a_selection_without_rows(make: Make) -> None:
    for options in ORDERS:
        reader = selection(make, np.zeros(ROWS, bool), batch_size=8, **options)
        assert (reader.num_rows, len(reader), list(reader), reader.partition(3)) == (0, 0, [], [])


@settings(max_examples=25)
@given(st.data())
def test_any_rows_of_any_blocks(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=8))
    total, draw = sum(blocks), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    mask = draw.random(total) < data.draw(st.sampled_from([0.0, 0.02, 0.4, 1.0]))
    written = samples.write(tmp_path_factory.mktemp("blocks"), [blocks])
    shuffle = data.draw(st.sampled_from(samples.SHUFFLES))
    options: dict[str, Any] = samples.order_of(shuffle) | {"num_threads": data.draw(st.integers(1, 3))}
    reader = select(written.read(**options), mask)
    found = []
    for step, batch in enumerate(reader):
        samples.check(batch, batch["id"].tolist())
        assert written.located(reader, step, len(batch["id"])) == batch["id"].tolist()
        found += batch["id"].tolist()
    assert sorted(found) == np.flatnonzero(mask).tolist()
    if not shuffle:
        assert found == sorted(found)


def test_units_without_selected_rows_are_not_read(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 12])
    path = Path(data.paths[0])
    content = bytearray(path.read_bytes())
    reader = data.read(batch_size=16, shuffle=True, seed=1)
    mask = np.zeros(240, bool)
    mask[40:60] = True
    expected_ids = sorted(samples.ids_of(select(reader, mask)))
    selected = select(data.read(batch_size=16, shuffle=True, seed=1), mask)
    list(selected)
    assert selected.stats()["units"] == 1
    assert expected_ids == list(range(40, 60))
    # Damage in another block changes nothing. Damage in this block names the row of the whole block.
    marker = content[-16:]
    starts = [at for at in range(len(content)) if content[at : at + 16] == marker]
    other = starts[5] + 30
    content[other : other + 40] = b"\xff" * 40
    path.write_bytes(content)
    damaged = data.read(batch_size=16, shuffle=True, seed=1, index_cache=None)
    assert sorted(samples.ids_of(select(damaged, mask))) == list(range(40, 60))
    plain = data.read(batch_size=16, index_cache=None)
    assert samples.ids_of(plain.take(np.r_[59, 40:60])) == [59, *range(40, 60)]
    mask[100:120] = True
    for reader in (select(damaged, mask), plain.take([40, 110]), damaged.take([40, 110]), plain.take([110, 40, 40])):
        with pytest.raises(fastpipe.errors.FastpipeError) as caught:
            list(reader)
        assert caught.value.block == 5


def test_a_memory_limit_is_checked_with_units_that_have_rows(tmp_path: Path) -> None:
    # Compressed, a block takes a thousandth of its memory.
    data = samples.write(tmp_path, [[20] * 200], codec="deflate", rest=100_000)
    mask = np.zeros(4000, bool)
    mask[3000:3100] = True
    options: dict[str, Any] = {"columns": ["id"], "batch_size": 5, "shuffle": True, "seed": 1, "num_threads": 1}
    limited = select(data.read(**options, memory_limit="4MB"), mask)
    with pytest.raises(fastpipe.errors.LimitError, match=r"memory_limit is 4\.0 MB, and this takes at least"):
        next(iter(limited))
    assert sorted(samples.ids_of(select(data.read(**options, memory_limit="64MB"), mask))) == list(range(3000, 3100))
    options["shuffle"], rows = False, np.random.default_rng(1).permutation(4000)[:30]
    with pytest.raises(fastpipe.errors.LimitError, match="units, because its rows are in any sequence"):
        next(iter(data.read(**options, memory_limit="8MB").take(rows)))
    assert samples.ids_of(data.read(**options, memory_limit="64MB").take(rows)) == rows.tolist()


def test_errors_name_the_row_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = [f"{i}\n" for i in range(100)]
    lines[70] = "oops\n"
    path.write_text("x\n" + "".join(lines))
    reader = fastpipe.read_csv(path, batch_size=10, features={"x": fastpipe.DenseSpec((), "int64")})
    good = reader.without(rows=[70])
    assert [int(i) for batch in good for i in batch["x"]] == [i for i in range(100) if i != 70]
    for shuffle in (False, True):
        shuffled = fastpipe.read_csv(
            path, batch_size=10, features={"x": fastpipe.DenseSpec((), "int64")}, shuffle=shuffle, seed=1
        )
        with pytest.raises(fastpipe.errors.FastpipeError) as caught:
            list(shuffled.without(rows=range(60)))
        assert caught.value.record == 70
        with pytest.raises(fastpipe.errors.FastpipeError) as caught:
            list(shuffled.take([99, 70, 3, 70]))
        assert caught.value.record == 70


# Rows at the start of a unit, a gap of whole slices or chunks, and rows in the middle and at the end.
RANGES = np.r_[0:9, 150:160, 390:400, 499]


@pytest.mark.parametrize("num_fetches", [1, 3])
def test_slices_without_selected_rows_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_fetches: int
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", 160)
    parquet.write_table(pa.table({"id": np.arange(500)}), tmp_path / "t.parquet", row_group_size=250)
    mask = np.isin(np.arange(500), RANGES)
    for shuffle in samples.SHUFFLES:
        options = samples.order_of(shuffle) | {"num_fetches": num_fetches}
        reader = select(fastpipe.read_parquet(tmp_path / "t.parquet", **options), mask)
        assert (len(reader._data.handle.unit_rows()) > 20) == (not shuffle)
        whole = rows_of(reader)
        assert sorted(itertools.chain(*whole)) == RANGES.tolist()
        parts = [reader.read_partition(part) for part in reader.partition(2)]
        assert sorted(row for part in parts for batch in rows_of(part) for row in batch) == RANGES.tolist()
        reader.set_epoch(0)
        states = [reader.state_dict() for _ in reader]
        for step, expected_rows in enumerate(whole):
            assert reader.batch_at(step, epoch=0)["id"].tolist() == expected_rows
            assert reader.locate(step, 0, 0).row == expected_rows[0] % 250
            reader.load_state_dict(states[step])
            assert rows_of(reader) == whole[step + 1 :]


@pytest.mark.parametrize("shuffle", samples.SHUFFLES)
def test_chunks_of_compressed_files_without_selected_rows(tmp_path: Path, shuffle: bool | str) -> None:
    path = tmp_path / "a.csv.gz"
    lines = "".join(f"{i},{'x' * 1500}\n" for i in range(500))
    path.write_bytes(gzip.compress(f"id,text\n{lines}".encode(), 1))
    mask = np.isin(np.arange(500), RANGES)
    for threads in (1, 3):
        reader = fastpipe.read_csv(path, num_threads=threads, **samples.order_of(shuffle))  # type: ignore[arg-type]
        assert len(reader._data.handle.unit_rows()) > 3
        assert sorted(itertools.chain(*rows_of(select(reader, mask)))) == RANGES.tolist()


def test_large_batches_of_large_units() -> None:
    rows = 200_000
    reader = fastpipe.from_arrays({"i": np.arange(rows)}, batch_size=50_000, shuffle=True, seed=1, num_threads=2)
    mask = np.arange(rows) % 7 != 3
    found = np.concatenate([batch["i"] for batch in select(reader, mask)])
    assert (np.sort(found) == np.flatnonzero(mask)).all()
    in_order = fastpipe.from_arrays({"i": np.arange(rows)}, batch_size=50_000, num_threads=2)
    assert (np.concatenate([b["i"] for b in select(in_order, mask)]) == np.flatnonzero(mask)).all()


def test_remote_readers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    served = fastpipe.from_arrays({"i": np.arange(100)}, batch_size=10).without(rows=range(50))
    with served.serve() as server, fastpipe.connect(server.url) as remote:
        assert [int(i) for batch in remote for i in batch["i"]] == list(range(50, 100))
        assert remote.locate(0, 3).row == 53
        with pytest.raises(fastpipe.errors.UnsupportedError, match=r"split\(\) needs the data itself"):
            remote.split(0.5, 0.5)
