"""Statistics of passes, their thread counts, and their memory limits."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import samples
import wire
from fastpipe._arguments import memory_size
from samples import SHUFFLES, Data, digests, order_of

WORK = ("reading", "decompressing", "indexing", "skipping", "decoding", "assembling", "planning")
COUNTS = (
    *("batches", "rows", "ready", "units", "rows_in_units", "rows_reopened", "rows_skipped"),
    *("bytes_read", "bytes_opened", "bytes_delivered"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Returns 300 rows in 65 blocks. 11 blocks are empty."""
    folder = tmp_path_factory.mktemp("engine")
    return samples.write(folder, [samples.blocks_of(200), samples.blocks_of(100)], "deflate", 100)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("plain"), [samples.blocks_of(300)])


def whole_pass(reader: fastpipe.Reader) -> dict[str, Any]:
    """Reads a pass without using its batches. Returns its statistics."""
    for _ in reader:
        pass
    return reader.stats()


# --- stats() ---


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_counts_are_exact(shuffle: bool | str, num_threads: int, codec: str, data: Data, plain: Data) -> None:
    files = plain if codec == "null" else data
    blocks = sum(int((fastpipe.avro.AvroFile(path).blocks["rows"] > 0).sum()) for path in files.paths)
    stats = whole_pass(files.read(**order_of(shuffle), num_threads=num_threads))
    assert (stats["batches"], stats["rows"], stats["ready"]) == (43, 300, 0)
    assert stats["units"] >= blocks
    assert stats["rows_in_units"] == 300 + stats["rows_reopened"]
    # Includes the blocks' headers and markers.
    assert stats["bytes_read"] > sum(int(fastpipe.avro.AvroFile(path).blocks["size"].sum()) for path in files.paths)
    assert stats["bytes_delivered"] > 300 * 8
    assert stats["threads"]["chosen"] == stats["threads"]["available"] == num_threads
    seconds = stats["seconds"]
    assert set(seconds) == {*WORK, "fetching", "elapsed", "consumer_waiting", "waiting_for_consumer"}
    assert all(part >= 0 for part in seconds.values())
    assert sum(seconds[name] for name in WORK) <= num_threads * seconds["elapsed"] * 1.1 + 0.01
    assert seconds["consumer_waiting"] + seconds["waiting_for_consumer"] <= seconds["elapsed"] * 1.1 + 0.01
    assert stats["memory"]["reserved"] == 0
    assert stats["memory"]["most_reserved"] > 0
    if codec == "deflate":
        assert stats["bytes_opened"] > stats["bytes_read"]
        assert [model["class"] for model in stats["model"]] == ["deflate"]
        assert stats["model"][0]["expansion"] > 1
    assert json.loads(json.dumps(stats)) == stats


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_counts_continue_over_epochs(shuffle: bool | str, data: Data) -> None:
    stats = whole_pass(data.read(**order_of(shuffle), epochs=3))
    assert (stats["batches"], stats["rows"]) == (3 * 43, 900)


def test_stats_describe_the_last_pass(data: Data) -> None:
    reader = data.read(batch_size=7, num_threads=1, prefetch=2)
    assert reader.stats() == {}
    batches = iter(reader)
    for count in range(1, 6):
        next(batches)
        stats = reader.stats()
        # Batches are counted when they are complete.
        assert stats["batches"] >= count
        assert stats["rows"] == 7 * stats["batches"]
    reader.close()
    assert reader.stats()["batches"] >= 5
    del batches
    ended = whole_pass(reader)
    assert ended["batches"] == 43
    # The statistics remain and no longer change.
    kept = reader.stats()
    assert [kept[name] for name in COUNTS] == [ended[name] for name in COUNTS]
    assert [kept["seconds"][name] for name in WORK] == [ended["seconds"][name] for name in WORK]
    batches = iter(reader)
    assert next(batches)["id"].tolist() == list(range(7))
    assert reader.stats()["batches"] < 43
    reader.set_epoch(5)
    assert reader.stats() == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_stats_of_only_its_own_passes(data: Data) -> None:
    reader = data.read(batch_size=7, num_threads=2)
    batches = iter(reader)
    next(batches)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            own = data.read(batch_size=7)
            code = 0 if reader.stats() == {} and "Nothing was read" in reader.explain() else 4
            if code == 0 and whole_pass(own)["rows"] != 300:
                code = 5
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert reader.stats()["batches"] >= 1


# --- Work in flight ---


def test_threads_stay_busy_during_a_long_block(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[1000] + [50] * 100])
    reader = data.read(batch_size=100, num_threads=2, columns=["id"])
    ready = []
    for _ in range(5):
        batches = iter(reader)
        deadline = time.monotonic() + 30
        while reader.stats()["ready"] < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        ready.append(reader.stats()["ready"])
    # Half of the work in flight is the long block; four blocks would be twelve batches. The cost model may distort
    # single passes while it learns.
    assert 16 <= sorted(ready)[2] <= 40
    assert [i for batch in batches for i in batch["id"].tolist()] == list(range(6000))


# --- explain() ---


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file with two scalars and an array of 2,000 longs, which takes most of the time."""
    schema = wire.record("R", a="long", numbers=wire.list_of("long"), b="double")
    numbers = wire.array(*(wire.long(i * 1_000_003) for i in range(2000)))
    row = wire.long(5) + numbers + wire.double(0.5)
    path = tmp_path_factory.mktemp("heavy") / "x.avro"
    path.write_bytes(wire.container(schema, [(50, row * 50)] * 40))
    return path


def test_before_any_pass_there_is_nothing_to_explain(data: Data) -> None:
    assert data.read(batch_size=7).explain() == "Nothing was read yet: explain() describes the last pass."


def test_a_greedy_consumer_waits_for_decoding(heavy: Path) -> None:
    reader = fastpipe.read_avro(heavy, batch_size=100, num_threads=1, epochs=3)
    named: list[str] = []
    for _ in range(10):  # Costs are measured, so on a busy machine another column may be named occasionally.
        whole_pass(reader)
        lines = reader.explain().splitlines()
        assert re.fullmatch(r"decode-bound on 1 thread: the consumer waits for the reader \d+% of the time\.", lines[0])
        assert re.match(r"Of the work: decoding \d+%", lines[1])
        named = [line for line in lines if line.startswith("The column ")]
        if len(named) == 1:
            break
    assert len(named) == 1
    assert re.fullmatch(r"The column 'numbers' takes \d+% of decoding: without it there is \d+% less work\.", named[0])


def test_the_reader_of_a_slow_consumer_is_no_bottleneck(heavy: Path) -> None:
    reader = fastpipe.read_avro(heavy, batch_size=8, columns=["a"], num_threads=1)
    # On a busy machine decoding may take half of this time.
    for _, _ in zip(range(25), reader, strict=False):
        time.sleep(0.04)
    stats = reader.stats()
    assert stats["seconds"]["waiting_for_consumer"] >= 0.4
    verdict = r"(consumer-bound: the reader waits for the consumer|not a bottleneck: the consumer waits for the reader)"
    assert re.match(rf"{verdict} \d+% of the time, on 1 thread", reader.explain())


# --- Values of num_threads and memory_limit ---


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_auto_yields_the_batches_of_fixed_threads(shuffle: bool | str, data: Data) -> None:
    expected = digests(data.read(**order_of(shuffle), num_threads=1, epochs=2))
    for num_threads in ("auto", 2, 5):
        reader = data.read(**order_of(shuffle), num_threads=num_threads, epochs=2)
        assert digests(reader) == expected
        threads = reader.stats()["threads"]
        assert 1 <= threads["chosen"] <= threads["available"]
    default = data.read(**order_of(shuffle), epochs=2)
    assert digests(default) == expected


@pytest.mark.parametrize("num_threads", ["all", "2", "", 0, -1, 4097])
def test_invalid_thread_counts(num_threads: Any, data: Data) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        data.read(batch_size=7, num_threads=num_threads)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("1.5GiB", 3 << 29),
        ("1.5 gib", 3 << 29),
        (" 64 KiB ", 65_536),
        ("2kB", 2000),
        ("1TB", 10**12),
        ("2.3 MB", 2_300_000),
        (".5MB", 500_000),
        ("7", 7),
        ("7B", 7),
        (1000, 1000),
    ],
)
def test_sizes_of_memory(text: str | int, size: int, data: Data) -> None:
    assert memory_size("memory_limit", text) == size
    data.read(batch_size=7, memory_limit=text)


@pytest.mark.parametrize(
    "text", ["", "MB", "-5MB", "1e9", "1e9B", "12 apples", "1.5.2GB", "1 PB", "0", "0.1B", "inf", 0, -1]
)
def test_invalid_sizes(text: str | int, data: Data) -> None:
    with pytest.raises(ValueError, match="memory_limit"):
        data.read(batch_size=7, memory_limit=text)


@pytest.mark.parametrize("size", [1.5, True, b"1MB"])
def test_sizes_of_the_wrong_type(size: Any, data: Data) -> None:
    with pytest.raises(TypeError, match="memory_limit"):
        data.read(batch_size=7, memory_limit=size)


# --- memory_limit ---


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Data]:
    """Returns 16 MB of rows of 40 kB. Most blocks have 8 rows, some have 24, and most bytes of a row aren't read."""
    folder = tmp_path_factory.mktemp("large")
    files = [[8] * 20 + [24], [8, 4] * 8]
    return {codec: samples.write(folder, files, codec, rest=40_000) for codec in ("null", "deflate")}


def limited(shuffle: bool | str, **options: Any) -> dict[str, Any]:
    return {"shuffle": shuffle, "batch_size": 16, "seed": 3, **options}


def megabytes(pattern: str, message: str) -> float:
    found = re.search(pattern, message)
    assert found is not None, message
    return float(found[1])


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("codec", ["null", "deflate"])
@pytest.mark.parametrize("num_threads", [1, 2, "auto"])
def test_the_named_minimum_of_memory_is_enough(
    shuffle: bool | str, codec: str, num_threads: Any, large: dict[str, Data]
) -> None:
    data = large[codec]
    options = limited(shuffle, **({} if shuffle is False else {"shuffle_buffer": 64}), num_threads=num_threads)
    both = digests(data.read(**options, epochs=2))
    expected, second = both[: len(both) // 2], both[len(both) // 2 :]
    reader = data.read(**options, memory_limit=100_000)
    with pytest.raises(
        fastpipe.errors.LimitError, match=r"memory_limit is 100\.0 KB, and this takes at least "
    ) as refused:
        iter(reader)
    # Uses the rounded value from the message, as a user would.
    limit = memory_size("memory_limit", f"{megabytes(r'at least ([0-9.]+) MB', str(refused.value))} MB")
    assert limit > 1_000_000
    reader = data.read(**options, memory_limit=limit)
    assert digests(reader) == expected
    memory = reader.stats()["memory"]
    assert memory["reserved"] == 0
    if shuffle is False or (shuffle is True and num_threads == 1):
        assert memory["most_reserved"] <= limit
    assert digests(data.read(**options, memory_limit=limit, epochs=2)) == expected + second


@pytest.mark.parametrize("shuffle", [True, "block", "buffer"])
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_the_suggested_buffer_fits(shuffle: bool | str, codec: str, large: dict[str, Data]) -> None:
    data = large[codec]
    options = limited(shuffle, memory_limit="12MB")
    with pytest.raises(fastpipe.errors.LimitError) as refused:
        iter(data.read(**options, shuffle_buffer=data.total, num_threads=1))
    named = int(megabytes(r"; shuffle_buffer=(\d+) would fit", str(refused.value)))
    assert 16 <= named < data.total
    assert named % 16 == 0
    reader = data.read(**options, shuffle_buffer=named, num_threads=1)
    assert digests(reader) == digests(data.read(**limited(shuffle, shuffle_buffer=named)))
    if shuffle is True:
        assert reader.stats()["memory"]["most_reserved"] <= 12_000_000


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_generous_limit_changes_nothing(shuffle: bool | str, data: Data) -> None:
    expected = digests(data.read(**order_of(shuffle)))
    assert digests(data.read(**order_of(shuffle), memory_limit="1GB")) == expected


def test_a_limit_holds_while_the_consumer_sleeps(large: dict[str, Data]) -> None:
    reader = large["null"].read(**limited(False), memory_limit="4MB", num_threads=2, prefetch=1000)
    batches = iter(reader)
    next(batches)
    for _ in range(10):
        time.sleep(0.01)
        memory = reader.stats()["memory"]
        assert memory["reserved"] <= memory["most_reserved"] <= 4_000_000
    reader.close()


def test_work_stops_while_the_consumer_keeps_the_memory(large: dict[str, Data]) -> None:
    reader = large["null"].read(**limited(False), memory_limit="4MB", num_threads=2, prefetch=1000)
    batches = iter(reader)
    next(batches)
    planning, last = -1.0, None
    while planning != last:  # Waits until as much is in flight as the limit allows.
        time.sleep(0.6)
        planning, last = reader.stats()["seconds"]["planning"], planning
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
    assert reader.stats()["seconds"]["planning"] == planning
    reader.close()


def test_a_reader_continues_after_a_limit_error(large: dict[str, Data]) -> None:
    reader = large["null"].read(**limited(True, shuffle_buffer=64), memory_limit=1000)
    for _ in range(2):
        with pytest.raises(fastpipe.errors.LimitError, match=r"memory_limit is 1\.0 KB, and "):
            iter(reader)
    assert reader.stats() == {}
    assert reader.epoch == 0
    assert sorted(samples.ids_of([reader.batch_at(step) for step in range(len(reader))])) == list(range(280))
