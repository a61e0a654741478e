"""The memory of a server: a bound for all that it makes, and for what one ticket can make it allocate."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from apart import wait_until
from fastpipe.service import _server
from fastpipe.service._served import Shares
from service_faults import serving
from service_tickets import answer, client_of, ticket

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")
pq = pytest.importorskip("pyarrow.parquet")

MiB = 1 << 20
HUGE = 2**31 - 1
ROWS, WIDTH = 20_000, 256
BATCH = 1024 * WIDTH * 4


def wide(**options: Any) -> fastpipe.Reader:
    """20 MB in batches of 1 MiB."""
    arrays = {"id": np.arange(ROWS), "x": np.zeros((ROWS, WIDTH), "float32")}
    given = {"batch_size": 1024, "shuffle": True, "seed": 7, "num_threads": 1} | options
    return fastpipe.from_arrays(arrays, **given)


class Highest:
    """The highest value of something, looked at again and again while the block runs."""

    def __init__(self, look: Any) -> None:
        self._look, self._ended = look, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.value = look()

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            self.value = max(self.value, self._look())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


# What is divided.


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 38), st.integers(1, 1000), st.none() | st.integers(1, 1 << 40))
def test_shares_never_add_up_to_more(memory: int, keep: int, passes: int, own: int | None) -> None:
    try:
        shares = Shares.of(memory, keep, passes)
    except ValueError:
        assert memory - keep < 4 * passes
        return
    assert shares.keep + shares.passes + shares.sending <= memory
    limit = shares.limit(own)
    assert limit <= (2**63 if own is None else own)
    # One always fits, and a batch, which is half of it at most, may always be sent.
    assert limit <= shares.passes
    assert limit // 2 <= shares.sending
    if own is None:
        assert limit * passes <= shares.passes


def test_what_does_not_fit_is_said_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"memory_limit is 1048576 bytes, and keep is 134217728 of these"):
        wide().serve(memory_limit="1MiB")
    with pytest.raises(fastpipe.LimitError, match=r"'default' doesn't fit its share.* at least \S+ MB") as told:
        wide().serve(memory_limit="16MiB", keep="1MiB")
    assert "max_passes" in str(told.value)
    for wrong in ("much", -1, 0):
        with pytest.raises(ValueError, match="memory_limit"):
            wide().serve(memory_limit=wrong)
    # What does fit; and a reader without rows.
    with wide().serve(memory_limit="64MiB", keep="1MiB", max_passes=4) as server:
        assert len(list(fastpipe.connect(server.url))) == 20
    empty = fastpipe.from_arrays({"id": np.arange(0)}, batch_size=10)
    with empty.serve(memory_limit="64MiB", keep="1MiB") as server:
        assert list(fastpipe.connect(server.url)) == []


def test_limits_of_readers_say_how_many_passes_are_open() -> None:
    # 9 MiB for each of them, of 3/4 of 32 MiB.
    with wide(memory_limit="9MiB").serve(memory_limit="33MiB", keep="1MiB", max_passes=16) as server:
        with Highest(lambda: server.stats()["passes"]) as most:
            remotes = [iter(fastpipe.connect(server.url, seed=seed, prefetch=1)) for seed in range(6)]
            found = [[next(remote)["id"].tolist() for remote in remotes] for _ in range(4)]
            for remote in remotes:
                remote.close()  # type: ignore[attr-defined]
        assert most.value == 2
    for seed in range(6):
        local = iter(wide(seed=seed))
        assert [step[seed] for step in found] == [next(local)["id"].tolist() for _ in range(4)]


def test_batches_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_PATIENCE", 1.0)
    with wide().serve(memory_limit="32MiB", keep="4MiB", max_passes=2) as server, ExitStack() as open_:
        shares = Shares.of(32 * MiB, 4 * MiB, 2)
        clients = [open_.enter_context(client_of(server.url)) for _ in range(30)]
        with Highest(lambda: server.stats()["batch_bytes"]) as most:
            streams = [client.do_get(ticket(clients[0], 0, 20, seed=number)) for number, client in enumerate(clients)]
            # Connections hold some of what nobody reads. Then each request has a batch that isn't taken, or is refused.
            assert wait_until(lambda: server.stats()["refused"] > 10)
        assert 4 * BATCH < most.value <= shares.keep + shares.sending
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
        # When they have gone, others are served.
        remote = fastpipe.connect(server.url, timeout=60)
        assert [batch["id"].tolist() for batch in remote] == [batch["id"].tolist() for batch in wide()]


CONFIG = """
import numpy as np
import fastpipe

arrays = {"id": np.arange(60_000), "x": np.zeros((60_000, 512), "float32")}
reader = fastpipe.from_arrays(arrays, batch_size=4096, shuffle=True, seed=7, num_threads=2)
"""


def test_a_process_stays_below_its_limit(tmp_path: Path) -> None:
    arguments = ("--memory-limit", "128MiB", "--keep", "16MiB", "--max-passes", "2")
    with serving(CONFIG, tmp_path, *arguments) as server, ExitStack() as open_:
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        # What Python, gRPC and a first pass need.
        assert len(list(fastpipe.connect(server.url))) == 15
        before = process.memory_info().rss
        with Highest(lambda: process.memory_info().rss) as most:
            clients = [open_.enter_context(client_of(server.url)) for _ in range(3)]
            streams = [client.do_get(ticket(clients[0], 0, 15, seed=seed)) for seed, client in enumerate(clients)]

            def pass_of(seed: int) -> None:
                remote = fastpipe.connect(server.url, seed=seed, timeout=60)
                ends.append(len(list(remote)))

            ends: list[int] = []
            threads = [threading.Thread(target=pass_of, args=(seed,)) for seed in range(100, 104)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for stream in streams:
                stream.cancel()
            del streams
        assert ends == [15] * 4
        assert most.value - before < 192 * MiB, f"{(most.value - before) >> 20} MiB"


# What one ticket can ask for.


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
    config = f"""
import fastpipe
reader = fastpipe.read_{kind}({str(files / f"rows.{kind}")!r}, batch_size=256, shuffle={shuffle}, seed=7,
                              memory_limit="40MiB", num_threads=1)
"""
    with serving(config, tmp_path) as server, client_of(server.url) as client:
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        assert isinstance(answer(client, ticket(client)), int)
        before = process.memory_info().rss
        with Highest(lambda: process.memory_info().rss) as most:
            for order in ({"batch_size": HUGE}, {"batch_size": 390_000}, {"batch_size": HUGE, "shuffle_buffer": 2**31}):
                told = answer(client, ticket(client, **order))
                assert isinstance(told, fastpipe.LimitError), told
                assert "memory_limit is 41.9 MB, and this takes at least " in str(told)
                assert "A smaller batch_size needs less" in str(told)
        assert most.value - before < 40 * MiB, f"{(most.value - before) >> 20} MiB"
        # One that fits is made, whether there are others behind it or not.
        for until in (1, 5):
            found = answer(client, ticket(client, until=until, batch_size=10_000, shuffle_buffer=20_000))
            assert isinstance(found, int)
            assert found > 10_000 * 120


def test_small_data_may_be_one_batch() -> None:
    with wide().serve() as server, client_of(server.url) as client:
        found = answer(client, ticket(client, batch_size=HUGE))
        assert isinstance(found, int)
        assert found > ROWS * WIDTH * 4
        # It is larger than what is kept.
        assert server.stats()["kept_bytes"] <= 128 * MiB
    with wide().serve(memory_limit="64MiB", keep="1MiB", max_passes=4) as server, client_of(server.url) as client:
        told = answer(client, ticket(client, batch_size=HUGE))
        assert isinstance(told, fastpipe.LimitError)
        assert "memory_limit is " in str(told)
        # A single batch of the served order fits.
        expected = wide().batch_at(3)["id"].tolist()
        assert fastpipe.connect(server.url).batch_at(3)["id"].tolist() == expected


class Endless:
    """More rows than any machine has memory for, none of which exist."""

    schema = pa.schema([pa.field("x", pa.list_(pa.float64(), 1000), nullable=False)])
    rows: ClassVar[list[int]] = [1_000_000] * 2000

    def read(self, unit: int) -> Any:
        raise AssertionError("nobody is to read this")

    def fingerprint(self) -> str:
        return "endless"


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of the machine is only known on Linux")
@pytest.mark.parametrize("shuffle", [False, "window"])
def test_without_a_limit_what_clients_choose_may_take_half_of_the_machine(shuffle: Any) -> None:
    reader = fastpipe.read_units(Endless(), batch_size=10, shuffle=shuffle, seed=7)
    with reader.serve() as server, client_of(server.url) as client:
        for stop in (1, 2):
            told = answer(client, ticket(client, 0, stop, batch_size=HUGE // 2))
            assert isinstance(told, fastpipe.LimitError), told
            assert "takes at least " in str(told)
        assert server.stats()["passes"] == 0
