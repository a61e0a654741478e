"""The guarantees of every order: each row once per epoch, with its own values, in the same batches on any machine."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import psutil
import pytest

import fastpipe
import samples
from processes import together
from samples import SHUFFLES, Data
from strategies import SOME, layouts, orders

# The last batch is a large part of the small datasets of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Writes 501 rows in three files."""
    return samples.write(
        tmp_path_factory.mktemp("order"), [samples.blocks_of(200), [], samples.blocks_of(301, (20, 1))], "deflate"
    )


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Writes rows so large that several threads share the work of one batch."""
    return samples.write(tmp_path_factory.mktemp("heavy"), [samples.blocks_of(300, (3, 0, 40, 1))], rest=8192)


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(
    layouts, orders(), st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.sampled_from(["null", "deflate"])
)
def test_each_row_is_read_once_per_epoch(
    tmp_path: Path, files: list[list[int]], order: dict[str, Any], epochs: int, threads: int, codec: str
) -> None:
    data = samples.write(tmp_path, files, codec)
    reader = data.read(**order, epochs=epochs, num_threads=threads)
    batches = list(reader)
    size = order["batch_size"]
    sizes = [min(size, data.total - at) for at in range(0, data.total, size)]
    if order["drop_last"]:
        sizes = [rows for rows in sizes if rows == size]
    assert len(reader) == len(batches) == len(sizes) * epochs
    assert [len(batch["id"]) for batch in batches] == sizes * epochs, "no batch spans two epochs"
    for number, batch in enumerate(batches):
        epoch, step = divmod(number, len(sizes))
        assert list(batch) == list(samples.FEATURES)
        samples.check(batch, data.located(reader, step, len(batch["id"]), epoch))
        if number % 5 == 0:
            assert samples.digest(reader.batch_at(step, epoch)) == samples.digest(batch)
    for epoch in range(epochs):
        ids = samples.ids_of(batches[epoch * len(sizes) : (epoch + 1) * len(sizes)])
        assert len(set(ids)) == len(ids) == sum(sizes)
        if not order["drop_last"]:
            samples.check_order(order["shuffle"], ids, data, reader.shuffle_buffer, size)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("which", ["data", "heavy"])
def test_threads_and_prefetch_change_nothing(shuffle: Any, which: str, request: pytest.FixtureRequest) -> None:
    data: Data = request.getfixturevalue(which)
    buffer = {} if shuffle is False else {"shuffle_buffer": 100}
    order = {"shuffle": shuffle, "batch_size": 33, "seed": 5, **buffer}
    reader = data.read(**order, num_threads=1, prefetch=1)
    expected = samples.digests(reader)
    assert len(expected) == len(reader)
    assert len(set(expected)) == len(expected)
    for threads, prefetch in itertools.product((1, 2, 8), (1, 2, 7)):
        found = samples.digests(data.read(**order, num_threads=threads, prefetch=prefetch))
        assert found == expected, (threads, prefetch)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_one_huge_block(tmp_path: Path, shuffle: Any) -> None:
    data = samples.write(tmp_path, [[5000]])
    for batch_size in (1, 1700, 6000):
        reader = data.read(shuffle=shuffle, seed=1, batch_size=batch_size, num_threads=2)
        batches = list(itertools.islice(reader, 50))
        for step, batch in enumerate(batches):
            samples.check(batch, data.located(reader, step, len(batch["id"]), 0))
        if batch_size > 1:
            samples.check_order(shuffle, samples.ids_of(batches), data, reader.shuffle_buffer, batch_size)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_several_threads_draw_from_one_pass(data: Data, shuffle: Any) -> None:
    order = {"shuffle": shuffle, "batch_size": 4, "seed": 1}
    expected = samples.digests(data.read(**order))
    reader = data.read(**order, num_threads=2, prefetch=5)
    batches = iter(reader)
    drawn: list[str] = []

    def draw() -> None:
        drawn.extend(samples.digests(batches))

    together([threading.Thread(target=draw) for _ in range(4)])
    assert sorted(drawn) == sorted(expected)
    assert reader.state_dict()["progress"]["epoch"] == reader.epoch == 1


@pytest.mark.parametrize("shuffle", SHUFFLES[1:])
def test_epochs_and_seeds_are_shuffled_differently(data: Data, shuffle: Any) -> None:
    def ids(seed: int, epoch: int) -> list[int]:
        reader = data.read(shuffle=shuffle, seed=seed, batch_size=10, columns=["id"])
        reader.set_epoch(epoch)
        return samples.ids_of(reader)

    found = [ids(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1, 2**40)]
    for a, b in itertools.combinations(found, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < len(a) / 4
    assert ids(1, 1) == found[4]
    # A pass over several epochs yields the same rows as passes over one epoch each.
    reader = data.read(shuffle=shuffle, seed=0, batch_size=10, columns=["id"], epochs=2)
    assert samples.ids_of(reader) == found[0] + found[1]
    assert samples.ids_of(itertools.islice(reader, 51)) == ids(0, 2)


def test_true_means_windows(data: Data) -> None:
    order = {"seed": 3, "batch_size": 10}
    assert samples.digests(data.read(shuffle=True, **order)) == samples.digests(data.read(shuffle="window", **order))


@pytest.mark.parametrize("shuffle", SHUFFLES[1:])
def test_a_generated_seed_is_shown_and_repeats_the_order(data: Data, shuffle: Any) -> None:
    reader = data.read(shuffle=shuffle, batch_size=20)
    assert f"seed={reader.seed}" in repr(reader)
    again = data.read(shuffle=shuffle, batch_size=20, seed=reader.seed)
    assert samples.digests(again) == samples.digests(reader)
    assert data.read(shuffle=shuffle, batch_size=20).seed != reader.seed


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("progress", [False, True])
def test_an_endless_pass(
    data: Data, shuffle: Any, progress: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = {"shuffle": shuffle, "batch_size": 100, "seed": 4}
    reader = data.read(**order, epochs=None, progress=progress)
    with pytest.raises(TypeError, match="epochs=None has no length"):
        len(reader)
    batches = iter(reader)
    assert samples.digests(itertools.islice(batches, 24)) == samples.digests(data.read(**order, epochs=4))
    # The reader reports the epoch of the last batch.
    assert reader.epoch == 3
    del batches
    empty = samples.write(tmp_path, [[], [0, 0]])
    assert list(empty.read(**order, epochs=None, progress=progress)) == []
    assert list(empty.read(**order, epochs=3)) == []
    if progress:
        assert "2.00k rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"shuffle": True, "world_size": 2}, ValueError, "set a seed"),
        ({"shuffle": "block", "world_size": 2}, ValueError, "set a seed"),
        ({"shuffle_buffer": 10}, ValueError, "shuffle=True"),
        ({"shuffle": "windows"}, ValueError, "'windows'"),
        ({"shuffle": 1}, ValueError, "got 1"),
        ({"shuffle": None}, ValueError, "got None"),
        ({"shuffle": True, "shuffle_buffer": 0}, ValueError, "shuffle_buffer must be between"),
        ({"shuffle": True, "shuffle_buffer": 2**31 + 1}, ValueError, "shuffle_buffer must be between"),
        ({"shuffle": True, "shuffle_buffer": True}, TypeError, "shuffle_buffer must be an integer"),
        ({"shuffle": True, "shuffle_buffer": 3.0}, TypeError, "shuffle_buffer must be an integer"),
        ({"seed": -1}, ValueError, "seed must be between"),
        ({"seed": 2**64}, ValueError, "seed must be between"),
        ({"seed": False}, TypeError, "seed must be an integer"),
        ({"seed": "1"}, TypeError, "seed must be an integer"),
        ({"epochs": 0}, ValueError, "epochs must be between"),
        ({"epochs": True}, TypeError, "epochs must be an integer"),
        ({"rank": 1}, ValueError, "rank must be between 0 and 0, .* got 1: pass world_size"),
        ({"rank": -1, "world_size": 2}, ValueError, "rank must be between"),
        ({"rank": True, "world_size": 2}, TypeError, "rank must be an integer"),
        ({"world_size": 0}, ValueError, "world_size must be between"),
        ({"world_size": True}, TypeError, "world_size must be an integer"),
        ({"shard_by": "rows"}, ValueError, '"window" or "batch"'),
        ({"shard_by": "block", "shuffle": True}, ValueError, '"window" or "batch"'),
        ({"shard_by": "window", "shuffle": "block"}, ValueError, '"block" or "batch"'),
        ({"shard_by": "window", "shuffle": "buffer"}, ValueError, '"block" or "batch"'),
        ({"on_uneven": "keep"}, ValueError, "on_uneven must be"),
        ({"on_uneven": True}, ValueError, "on_uneven must be"),
    ],
)
def test_invalid_arguments_are_refused(data: Data, arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        data.read(batch_size=10, **arguments)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_damage_is_reported_at_its_batch(tmp_path: Path, shuffle: Any) -> None:
    data = samples.write(tmp_path, [[5, 7] * 4, [7, 5] * 4])
    # The buffer is smaller than the dataset, so the reader decodes the damaged block only when it is needed.
    order = {"shuffle": shuffle, "batch_size": 3, "seed": 8, **({"shuffle_buffer": 12} if shuffle else {})}
    reader = data.read(**order)
    expected = samples.digests(reader)
    block = fastpipe.avro.AvroFile(data.paths[1]).blocks[3]
    damaged = bytearray(Path(data.paths[1]).read_bytes())
    # After the block's header of three bytes, the first record begins with a varint that doesn't end.
    start = int(block["offset"]) + 3
    damaged[start : start + 11] = b"\xff" * 11
    Path(data.paths[1]).write_bytes(damaged)
    steps = range(len(expected))
    reader.set_epoch(0)
    places = [[reader.locate(step, slot) for slot in range(3)] for step in steps]
    hit = [any((place.file, place.block) == (data.paths[1], 3) for place in row) for row in places]
    first = hit.index(True)
    assert first > 0
    for threads, prefetch in ((1, 1), (3, 8)):
        reader = data.read(**order, num_threads=threads, prefetch=prefetch)
        batches = iter(reader)
        found = [samples.digest(next(batches)) for _ in range(first)]
        assert found == expected[:first]
        for _ in range(3):
            with pytest.raises(fastpipe.errors.MalformedFileError) as caught:
                next(batches)
            assert (caught.value.path, caught.value.block) == (data.paths[1], 3)
        # The state that is saved now is the position just before the damage.
        again = data.read(**order)
        again.load_state_dict(reader.state_dict())
        with pytest.raises(fastpipe.errors.MalformedFileError):
            next(iter(again))
    for step in steps:
        if hit[step]:
            with pytest.raises(fastpipe.errors.MalformedFileError):
                reader.batch_at(step, 0)
        else:
            assert samples.digest(reader.batch_at(step, 0)) == expected[step]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_batches_out_of_range_raise_index_errors(data: Data, shuffle: Any) -> None:
    reader = data.read(shuffle=shuffle, seed=2, batch_size=100)
    assert len(reader.batch_at(5)["id"]) == 1
    assert reader.locate(5, 0, epoch=3) in data.ids
    for step in (6, 2**40):
        with pytest.raises(IndexError, match="an epoch has 6 batches"):
            reader.batch_at(step)
        with pytest.raises(IndexError, match="an epoch has 6 batches"):
            reader.locate(step, 0)
    for step, slot in ((5, 1), (0, 100)):
        with pytest.raises(IndexError, match=f"row {slot} does not exist"):
            reader.locate(step, slot)
    with pytest.raises(IndexError, match="an epoch has 0 batches"):
        data.read(shuffle=shuffle, seed=2, batch_size=1000, drop_last=True).batch_at(0)
    for bad in (-1, 2**63):
        with pytest.raises(IndexError, match="an epoch has 6 batches"):
            reader.batch_at(bad)
    with pytest.raises(IndexError, match="row -1 does not exist"):
        reader.locate(0, -1)
    with pytest.raises(ValueError, match="epoch must be between"):
        reader.batch_at(0, epoch=-1)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_looking_batches_up_does_not_affect_the_pass(data: Data, shuffle: Any) -> None:
    reader = data.read(shuffle=shuffle, seed=2, batch_size=50)
    expected = samples.digests(reader)
    reader.set_epoch(0)
    found = []
    for step, batch in enumerate(reader):
        found.append(samples.digest(batch))
        assert samples.digest(reader.batch_at(10 - step, 0)) == expected[10 - step]
        reader.locate(0, 0, epoch=7)
    assert found == expected


def check_nothing_stays(reader: fastpipe.Reader) -> None:
    """Checks that passes that are closed or dropped midway leave neither threads nor memory."""
    process = psutil.Process()

    def leave(times: int) -> int:
        for i in range(times):
            batches = iter(reader)
            for _ in range(i % 5):
                next(batches)
            if i % 2:
                reader.close()
                with pytest.raises(fastpipe.FastpipeError, match="closed"):
                    next(batches)
            del batches
        gc.collect()
        return process.memory_info().rss

    resident = [leave(60) for _ in range(6)]
    # By now pools and malloc have reached their steady size. Leaking a few blocks would grow by far more.
    assert max(resident[2:]) - resident[1] < 8 << 20
    assert samples.threads_are(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_leaving_early_releases_everything(heavy: Data, shuffle: Any) -> None:
    buffer = {} if shuffle is False else {"shuffle_buffer": 40}
    check_nothing_stays(heavy.read(shuffle=shuffle, seed=1, batch_size=16, num_threads=2, prefetch=4, **buffer))


# Not strict: it depends on the timing of the threads whether batches wait when their pass is closed.
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_leaving_early_while_batches_wait_for_each_other(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[300]], rest=8192)
    features = {"rest": fastpipe.DenseSpec((), "bytes")}
    check_nothing_stays(data.read(features=features, batch_size=4, num_threads=4, prefetch=16))


def _digests_in_child(reader: fastpipe.Reader, out: Any) -> None:
    out.put(samples.digests(reader))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_forked_child_reads_while_the_parent_continues(data: Data, shuffle: Any) -> None:
    reader = data.read(shuffle=shuffle, seed=1, batch_size=20, num_threads=2, epochs=2)
    expected = samples.digests(reader)
    reader.set_epoch(0)
    active = iter(reader)
    found = [samples.digest(next(active)) for _ in range(7)]
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    process = context.Process(target=_digests_in_child, args=(reader, out))
    process.start()
    # The pass that the parent has begun counts as an epoch, so the child begins with the next epoch.
    later = data.read(shuffle=shuffle, seed=1, batch_size=20, epochs=2)
    later.set_epoch(1)
    assert out.get(timeout=60) == samples.digests(later)
    process.join(timeout=500)
    assert process.exitcode == 0
    assert found + samples.digests(active) == expected
