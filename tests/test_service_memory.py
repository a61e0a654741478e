"""The memory of a server: bounds for all its batches and passes, and for the batches of one ticket."""

from __future__ import annotations

import resource
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from apart import wait_until
from fastpipe.service import _server
from fastpipe.service._served import Shares
from processes import together
from samples import ids_by_batch as ids
from service_faults import rows_of, serving
from service_tickets import Highest, answer, client_of, ticket

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")
pq = pytest.importorskip("pyarrow.parquet")

MiB = 1 << 20
HUGE = 2**31 - 1
ROWS, WIDTH = 20_000, 256
BATCH = 1024 * WIDTH * 4


def wide(**options: Any) -> fastpipe.Reader:
    """20 MB in batches of 1 MiB."""
    return rows_of(ROWS, WIDTH, **{"batch_size": 1024, "num_threads": 1} | options)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 38), st.integers(1, 1000), st.none() | st.integers(1, 1 << 40))
def test_shares_never_exceed_the_limit(memory: int, cache: int, passes: int, own: int | None) -> None:
    try:
        shares = Shares.of(memory, cache, passes)
    except ValueError:
        assert memory - cache < 4 * passes
        return
    assert shares.cache_bytes + shares.passes + shares.sending <= memory
    limit = shares.limit(own)
    assert limit <= (2**63 if own is None else own)
    # One pass always fits. A batch takes at most half of its memory and can always be sent.
    assert limit <= shares.passes
    assert limit // 2 <= shares.sending
    if own is None:
        assert limit * passes <= shares.passes


def test_limits_are_checked_when_a_server_starts() -> None:
    with pytest.raises(ValueError, match=r"memory_limit is 1048576 bytes, and cache_bytes is 134217728 of these"):
        wide().serve(memory_limit="1MiB")
    with pytest.raises(fastpipe.errors.LimitError, match=r"'default' doesn't fit its share.* at least \S+ MB") as told:
        wide().serve(memory_limit="16MiB", cache_bytes="1MiB")
    assert "max_passes" in str(told.value)
    for wrong in ("much", -1, 0):
        with pytest.raises(ValueError, match="memory_limit"):
            wide().serve(memory_limit=wrong)
    # Limits that suffice, also for a reader without rows.
    with wide().serve(memory_limit="64MiB", cache_bytes="1MiB", max_passes=4) as server:
        assert len(list(fastpipe.connect(server.url))) == 20
    with rows_of(0).serve(memory_limit="64MiB", cache_bytes="1MiB") as server:
        assert list(fastpipe.connect(server.url)) == []


@pytest.mark.parametrize(
    ("own", "options"),
    # In the second case each pass may take 9 MiB of 3/4 of 32 MiB.
    [
        ({}, {"max_passes": 2, "cache_bytes": 1}),
        ({"memory_limit": "9MiB"}, {"memory_limit": "33MiB", "cache_bytes": "1MiB"}),
    ],
    ids=["max_passes", "memory_limit"],
)
def test_open_passes_are_bounded(own: dict[str, Any], options: dict[str, Any]) -> None:
    with wide(**own).serve(**options) as server:
        with Highest(lambda: server.stats()["passes"]) as most:
            remotes = [iter(fastpipe.connect(server.url, seed=seed, prefetch=1)) for seed in range(6)]
            found = [ids(next(remote) for remote in remotes) for _ in range(4)]
            for remote in remotes:
                remote.close()  # type: ignore[attr-defined]
        assert most.value == 2
    for seed in range(6):
        local = iter(wide(seed=seed))
        assert [step[seed] for step in found] == ids(next(local) for _ in range(4))


def test_a_client_that_pauses_costs_bounded_memory() -> None:
    with rows_of(40_000, 1000, batch_size=256).serve(cache_bytes="8MiB") as server:
        batches = iter(fastpipe.connect(server.url, prefetch=2))
        next(batches)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        time.sleep(1.0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB, of 160 MB of data"
        assert server.stats()["batches"] < 40


def test_unread_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_PATIENCE", 1.0)
    with wide().serve(memory_limit="32MiB", cache_bytes="4MiB", max_passes=2) as server, ExitStack() as open_:
        shares = Shares.of(32 * MiB, 4 * MiB, 2)
        clients = [open_.enter_context(client_of(server.url)) for _ in range(30)]
        with Highest(lambda: server.stats()["batch_bytes"]) as most:
            streams = [client.do_get(ticket(clients[0], 0, 20, seed=number)) for number, client in enumerate(clients)]
            # Connections buffer some data. Then each request has an unread batch or is refused.
            assert wait_until(lambda: server.stats()["refused"] > 10)
        assert 4 * BATCH < most.value <= shares.cache_bytes + shares.sending
        assert server.stats()["refused"] < 30
        told = []
        for stream in streams:
            try:
                stream.read_chunk()
            except flight.FlightUnavailableError as error:
                told.append(str(error))
        assert any("memory_limit" in text for text in told)
        assert all("this server is busy" in text and "; ask another one, or later" in text for text in told)
        for stream in streams:
            stream.cancel()
        del streams
        # Afterwards other clients are served.
        remote = fastpipe.connect(server.url, timeout=60)
        assert ids(remote) == ids(wide())


def test_a_process_stays_below_its_limit(tmp_path: Path) -> None:
    arguments = ("--memory-limit", "128MiB", "--cache-bytes", "16MiB", "--max-passes", "2")
    with (
        serving(rows_of(60_000, 512, batch_size=4096, num_threads=2), tmp_path, *arguments) as server,
        ExitStack() as open_,
    ):
        process = server.watched()
        # Memory of Python, gRPC and a first pass.
        assert len(list(fastpipe.connect(server.url))) == 15
        before = process.memory_info().rss
        with Highest(lambda: process.memory_info().rss) as most:
            clients = [open_.enter_context(client_of(server.url)) for _ in range(3)]
            streams = [client.do_get(ticket(clients[0], 0, 15, seed=seed)) for seed, client in enumerate(clients)]

            def pass_of(seed: int) -> None:
                remote = fastpipe.connect(server.url, seed=seed, timeout=60)
                ends.append(len(list(remote)))

            ends: list[int] = []
            together(threading.Thread(target=pass_of, args=(seed,)) for seed in range(100, 104))
            for stream in streams:
                stream.cancel()
            del streams
        assert ends == [15] * 4
        assert most.value - before < 192 * MiB, f"{(most.value - before) >> 20} MiB"


# One ticket.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 MB of rows, as Avro and as Parquet."""
    folder = tmp_path_factory.mktemp("files")
    rows = 400_000
    columns = {f"x{number}": np.random.default_rng(number).random(rows, "float32") for number in range(30)}
    table = pa.table({"id": np.arange(rows)} | columns)
    fastpipe.write_avro(folder / "rows.avro", table)
    pq.write_table(table, folder / "rows.parquet", row_group_size=10_000)
    return folder


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["avro", "parquet"])
def test_a_batch_that_does_not_fit_is_refused(files: Path, kind: str, shuffle: bool, tmp_path: Path) -> None:
    read = {"avro": fastpipe.read_avro, "parquet": fastpipe.read_parquet}[kind]
    options = {"batch_size": 256, "shuffle": shuffle, "seed": 7, "memory_limit": "40MiB", "num_threads": 1}
    reader = read(files / f"rows.{kind}", **options)
    with serving(reader, tmp_path) as server, client_of(server.url) as client:
        process = server.watched()
        assert isinstance(answer(client, ticket(client)), int)
        before = process.memory_info().rss
        with Highest(lambda: process.memory_info().rss) as most:
            for order in ({"batch_size": HUGE}, {"batch_size": 390_000}, {"batch_size": HUGE, "shuffle_buffer": 2**31}):
                told = answer(client, ticket(client, **order))
                assert isinstance(told, fastpipe.errors.LimitError), told
                assert "memory_limit is 41.9 MB, and this takes at least " in str(told)
                assert "A smaller batch_size needs less" in str(told)
        assert most.value - before < 40 * MiB, f"{(most.value - before) >> 20} MiB"
        # A batch that fits is made, with and without batches after it.
        for until in (1, 5):
            found = answer(client, ticket(client, until=until, batch_size=10_000, shuffle_buffer=20_000))
            assert isinstance(found, int)
            assert found > 10_000 * 120


def test_small_data_may_be_one_batch() -> None:
    with wide().serve() as server, client_of(server.url) as client:
        found = answer(client, ticket(client, batch_size=HUGE))
        assert isinstance(found, int)
        assert found > ROWS * WIDTH * 4
        # It is larger than the memory for kept batches.
        assert server.stats()["kept_bytes"] <= 128 * MiB
    with (
        wide().serve(memory_limit="64MiB", cache_bytes="1MiB", max_passes=4) as server,
        client_of(server.url) as client,
    ):
        told = answer(client, ticket(client, batch_size=HUGE))
        assert isinstance(told, fastpipe.errors.LimitError)
        assert "memory_limit is " in str(told)
        # A single batch of the served order fits.
        expected = wide().batch_at(3)["id"].tolist()
        assert fastpipe.connect(server.url).batch_at(3)["id"].tolist() == expected


class Endless:
    """More rows than any machine has memory for. They must not be read."""

    schema = pa.schema([pa.field("x", pa.list_(pa.float64(), 1000), nullable=False)])
    rows: ClassVar[list[int]] = [1_000_000] * 2000

    def read(self, unit: int) -> Any:
        raise AssertionError("these rows must not be read")

    def fingerprint(self) -> str:
        return "endless"


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of the machine is only known on Linux")
@pytest.mark.parametrize("shuffle", [False, "window"])
def test_without_a_limit_batches_of_clients_may_take_half_of_the_machine(shuffle: Any) -> None:
    reader = fastpipe.read_units(Endless(), batch_size=10, shuffle=shuffle, seed=7)
    with reader.serve() as server, client_of(server.url) as client:
        for stop in (1, 2):
            told = answer(client, ticket(client, 0, stop, batch_size=HUGE // 2))
            assert isinstance(told, fastpipe.errors.LimitError), told
            assert "takes at least " in str(told)
        assert server.stats()["passes"] == 0
