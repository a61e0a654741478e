"""Maps of readers: order, states, errors, threads, random numbers, rebatching and leases."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import Slices
from fastpipe.typing import Mapped
from mapping import ROWS, SIZE, SPECS, expected, ids, reader_of, values, with_y
from samples import through_json

WAIT = 60.0


def noisy(batch: dict[str, Any], rng: np.random.Generator) -> tuple[list[int], list[int]]:
    return ids(batch), rng.integers(2**60, size=2).tolist()


def map_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fastpipe-map")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("fastpipe-map"):
            thread.join(WAIT)
    assert not map_threads()


ORDERS = [
    {"shuffle": False, "shuffle_buffer": None},
    {},
    {"shuffle": "block", "shard_by": "batch"},
    {"shuffle": "buffer", "shuffle_buffer": 13, "shard_by": "batch"},
]
RANKS = [{}, {"rank": 1, "world_size": 3}, {"rank": 1, "world_size": 2, "on_uneven": "pad"}, {"epochs": 2}]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_those_of_the_reader_and_resume_at_every_step(
    order: dict[str, Any], ranks: dict[str, Any], threads: int
) -> None:
    options = order | ranks
    plain, reader = reader_of(**options), reader_of(**options)
    mapped = reader.map(with_y, num_threads=threads)
    wanted = expected(plain)
    assert len(mapped) == len(plain) == len(wanted)
    assert (mapped.rank, mapped.world_size, mapped.batch_size) == (plain.rank, plain.world_size, SIZE)

    plain.set_epoch(0)
    batches, others = iter(mapped), iter(plain)
    states = [mapped.state_dict()]
    assert states[0] == plain.state_dict()
    for value in wanted:
        batch = next(batches)
        assert ("valid" in batch) == (options.get("on_uneven") == "pad")
        assert values([batch]) == [value]
        next(others)
        states.append(mapped.state_dict())
        assert states[-1] == plain.state_dict()
        assert mapped.epoch == plain.epoch
    assert next(batches, None) is next(others, None) is None
    assert mapped.state_dict() == plain.state_dict()
    assert mapped.epoch == plain.epoch
    assert values(mapped) == expected(reader_of(**options), options.get("epochs", 1))

    for step, state in enumerate(states):
        mapped.load_state_dict(through_json(state))
        assert values(mapped) == wanted[step:]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 9])
def test_the_next_pass_follows_what_the_consumer_took(taken: int, threads: int) -> None:
    plain, mapped = reader_of(epochs=2), reader_of(epochs=2).map(with_y, num_threads=threads, prefetch=20)
    for _ in range(2):
        for epoch in range(2):
            others, batches = iter(plain), iter(mapped)
            for _ in range(taken):
                assert values([next(batches)]) == [(ids(batch := next(others)), (batch["x"] / 2).tolist())]
            assert (mapped.epoch, mapped._passes.next_epoch) == (plain.epoch, plain._passes.next_epoch)
            assert mapped._passes.pass_epoch == plain._passes.pass_epoch
            assert ids(mapped.batch_at(2)) == ids(plain.batch_at(2))
            if epoch:
                assert mapped.state_dict() == plain.state_dict()
                shard = mapped.shard(2, 1)
                assert values(shard) == [(ids(b), (b["x"] / 2).tolist()) for b in plain.shard(2, 1)]
    state = through_json(plain.state_dict())
    for each in (plain, mapped):
        each.load_state_dict(state)
        next(iter(each))
        iter(each)  # Leaves the resumed pass.
        iter(each)  # A pass without a batch doesn't count, and resumes nothing.
        assert each.state_dict() == plain.state_dict()
    for each in (plain, mapped):
        each.load_state_dict(state)
        iter(each)
        step, epoch = state["progress"]["step"], state["progress"]["epoch"]
        assert ids(next(iter(each))) == ids(plain.batch_at(step, epoch))


def test_batch_at_and_set_epoch() -> None:
    reader = reader_of()
    mapped = reader.map(with_y)
    for epoch in range(3):
        mapped.set_epoch(epoch)
        wanted = expected(reader_of(), epoch)
        assert values(mapped.batch_at(step) for step in range(len(mapped))) == wanted
        assert values(mapped.batch_at(step, 2 - epoch) for step in range(2)) == expected(reader_of(), 2 - epoch)[:2]
    for step in (-1, 9, 2**70):
        with pytest.raises(IndexError, match="does not exist"):
            mapped.batch_at(step)
    with pytest.raises(TypeError, match="step must be an integer"):
        mapped.batch_at(1.0)
    with pytest.raises(ValueError, match="epoch must be between"):
        mapped.set_epoch(-1)


def test_results_of_any_kind_and_length() -> None:
    mapped = reader_of().map(lambda batch: batch["x"][batch["x"] % 3 == 0].tolist())
    wanted = [[i for i in ids(batch) if i % 3 == 0] for batch in reader_of()]
    assert list(mapped) == wanted
    assert list(reader_of().map(lambda batch: None, num_threads=2)) == [None] * 9
    for threads in (0, 2):
        nothing = reader_of().map(lambda batch: None, num_threads=threads)
        assert list(nothing.map(lambda batch: batch is None)) == [True] * 9
    empty = fastpipe.from_arrays({"x": np.arange(0)}, batch_size=SIZE)
    assert list(empty.map(with_y, num_threads=2)) == []


def test_the_function_may_keep_and_change_batches() -> None:
    kept = []

    def negated(batch: dict[str, Any]) -> dict[str, Any]:
        kept.append(batch)
        batch["x"] *= -1
        return batch

    mapped = reader_of().map(negated, num_threads=2)
    wanted = [[-i for i in ids(batch)] for batch in reader_of()]
    assert [ids(batch) for batch in mapped] == wanted
    assert sorted(map(ids, kept)) == sorted(wanted)
    assert [ids(mapped.batch_at(step, 0)) for step in range(9)] == wanted


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("at", range(9))
def test_an_error_is_raised_at_its_batch(at: int, threads: int) -> None:
    failing = set(ids(reader_of().batch_at(at)))

    def careful(batch: dict[str, Any]) -> dict[str, Any]:
        if failing & set(ids(batch)):
            raise KeyError("bad batch")
        return with_y(batch)

    wanted = expected(reader_of())
    mapped = reader_of().map(careful, num_threads=threads)
    batches = iter(mapped)
    assert values(next(batches) for _ in range(at)) == wanted[:at]
    for _ in range(2):
        with pytest.raises(KeyError, match="bad batch") as caught:
            next(batches)
        assert caught.value.__notes__ == [
            f"The function of map() raised this error for the batch of epoch 0, step {at}, rank 0."
        ]
    mapped.load_state_dict(through_json(mapped.state_dict()))
    with pytest.raises(KeyError):
        next(iter(mapped))
    with pytest.raises(KeyError):
        mapped.batch_at(at, 0)
    failing.clear()
    mapped.load_state_dict(mapped.state_dict())
    assert values(mapped) == wanted[at:]


@pytest.mark.parametrize("threads", [0, 2])
def test_stop_iteration_does_not_end_a_pass(threads: int) -> None:
    def stops(batch: dict[str, Any]) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match=r"the function of map\(\) raised StopIteration") as caught:
        list(reader_of().map(stops, num_threads=threads))
    assert "step 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_another_pass_is_an_error_of_the_function(threads: int) -> None:
    other = reader_of()
    closed = iter(other)
    other.close()
    batches = iter(reader_of().map(lambda batch: next(closed), num_threads=threads))
    for _ in range(2):
        with pytest.raises(fastpipe.errors.PassClosedError, match="close") as caught:
            next(batches)
        assert "step 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("threads", [0, 2])
def test_errors_of_the_reader_are_raised_in_their_place(threads: int, tmp_path: Any) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("x\n" + "\n".join(str(i) if i != 23 else "oops" for i in range(ROWS)) + "\n")
    features = {"x": fastpipe.DenseSpec((), "int64")}
    mapped = fastpipe.read_csv(path, features=features, batch_size=SIZE).map(with_y, num_threads=threads)
    batches = iter(mapped)
    assert [next(batches)["x"][0] for _ in range(4)] == [0, 5, 10, 15]
    for _ in range(2):
        with pytest.raises(fastpipe.FastpipeError, match="oops") as caught:
            next(batches)
        assert not getattr(caught.value, "__notes__", [])
    assert mapped.state_dict()["progress"]["step"] == 4


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_slow_functions_keep_the_order_and_the_number_in_flight(threads: int, prefetch: int) -> None:
    """The first call of each group of `threads` ends last."""
    changed = threading.Condition()
    begun: list[int] = []
    ended: list[int] = []
    taken = 0
    most = 0
    places = {tuple(ids(batch)): step for step, batch in enumerate(reader_of())}

    def slow(batch: dict[str, Any]) -> int:
        nonlocal most
        step = places[tuple(ids(batch))]
        with changed:
            begun.append(step)
            most = max(most, len(begun) - taken)
            changed.notify_all()
            # With two threads, an even step waits until the odd step after it has ended.
            if threads == 2 and step % 2 == 0 and step + 1 < len(places):
                assert changed.wait_for(lambda: step + 1 in ended, WAIT)
            ended.append(step)
            changed.notify_all()
        return step

    mapped = reader_of().map(slow, num_threads=threads, prefetch=prefetch)
    batches = iter(mapped)
    found = []
    for step in range(len(places)):
        with changed:
            # All batches that may be in flight have begun before the next one is taken.
            limit = min(step + threads + prefetch, len(places)) if step else 0
            assert changed.wait_for(lambda limit=limit: len(begun) >= limit - 1, WAIT)
        found.append(next(batches))
        with changed:
            taken += 1
    assert found == list(range(len(places)))
    assert next(batches, None) is None
    assert most <= threads + prefetch
    if threads == 2:
        assert ended[:2] == [1, 0]
    assert not map_threads()


@pytest.mark.parametrize("threads", [0, 3])
def test_two_threads_draw_from_one_pass(threads: int) -> None:
    mapped = reader_of(batch_size=1).map(with_y, num_threads=threads)
    batches = iter(mapped)
    found: list[int] = []

    def draw() -> None:
        found.extend(ids(batch)[0] for batch in batches)

    drawing = [threading.Thread(target=draw) for _ in range(2)]
    for thread in drawing:
        thread.start()
    for thread in drawing:
        thread.join(WAIT)
    assert sorted(found) == list(range(ROWS))
    assert mapped.epoch == 1


def test_closing_wakes_up_a_consumer() -> None:
    running, go, told = threading.Event(), threading.Event(), []

    def waits(batch: dict[str, Any]) -> Any:
        running.set()
        assert go.wait(WAIT)
        return batch

    mapped = reader_of().map(waits, num_threads=1)
    batches = iter(mapped)

    def draw() -> None:
        try:
            next(batches)
        except fastpipe.errors.PassClosedError as error:
            told.append(str(error))

    consumer = threading.Thread(target=draw)
    closer = threading.Thread(target=mapped.close)
    consumer.start()
    assert running.wait(WAIT)
    closer.start()
    go.set()
    closer.join(WAIT)
    consumer.join(WAIT)
    # Without the error, the consumer took the result before the pass was closed.
    assert told in ([], ["the pass was closed: close() was called; iter(reader) starts a new pass"])
    with pytest.raises(fastpipe.errors.PassClosedError, match=r"close\(\) was called"):
        next(batches)
    assert not map_threads()
    assert len(list(reader_of().map(with_y, num_threads=1))) == 9


CLOSING: dict[str, Callable[[fastpipe.Reader, Mapped], Any]] = {
    "close": lambda reader, mapped: mapped.close(),
    "with": lambda reader, mapped: mapped.__exit__(None, None, None),
    "iter": lambda reader, mapped: iter(mapped),
    "load": lambda reader, mapped: mapped.load_state_dict(mapped.state_dict()),
    "reader": lambda reader, mapped: reader.close(),
    "reader's iter": lambda reader, mapped: iter(reader),
}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("way", CLOSING)
def test_a_closed_pass_raises(way: str, threads: int) -> None:
    reader = reader_of()
    mapped = reader.map(with_y, num_threads=threads)
    for taken in (0, 2):
        batches = iter(mapped)
        drawn = [next(batches) for _ in range(taken)]
        CLOSING[way](reader, mapped)
        if way.startswith("reader"):  # Results that are ready may still be returned.
            with pytest.raises(fastpipe.errors.PassClosedError):
                list(batches)
        for _ in range(2):
            with pytest.raises(fastpipe.errors.PassClosedError, match="the pass was closed: "):
                next(batches)
        assert len(drawn) == taken


@pytest.mark.parametrize("threads", [0, 2])
def test_dropping_a_pass_ends_its_threads(threads: int) -> None:
    mapped = reader_of().map(with_y, num_threads=threads)
    batches = iter(mapped)
    next(batches)
    assert bool(map_threads()) == bool(threads)
    gc.disable()
    try:
        del batches
        for thread in threading.enumerate():
            if thread.name.startswith("fastpipe-map"):
                thread.join(WAIT)
        assert not map_threads()
    finally:
        gc.enable()


def test_the_function_must_not_draw_from_its_pass() -> None:
    for threads in (0, 1):
        found: list[Iterator[Any]] = []
        mapped = reader_of().map(lambda batch, found=found: next(found[0]), num_threads=threads)
        found.append(iter(mapped))
        with pytest.raises(RuntimeError, match="must not draw from the pass"):
            next(found[0])
        closing = reader_of().map(lambda batch, found=found: found[1].close(), num_threads=threads)
        found.append(closing)  # type: ignore[arg-type]
        with pytest.raises(fastpipe.errors.PassClosedError) if threads else pytest.raises(fastpipe.FastpipeError):
            list(closing)


def test_ctrl_c_loses_no_batch() -> None:
    """Ctrl-C interrupts the function in the consumer's thread, and the wait for a thread."""
    calls = itertools.count()

    def interrupted(batch: dict[str, Any]) -> dict[str, Any]:
        batch["x"] += 1  # The batch is read again, without this change.
        if next(calls) in (0, 3, 10):
            os.kill(os.getpid(), signal.SIGINT)
        return batch

    def all_of(mapped: Mapped) -> list[list[int]]:
        batches, found = iter(mapped), []
        while True:
            try:
                found.append(ids(next(batches)))
            except KeyboardInterrupt:
                assert mapped.state_dict()["progress"]["step"] == len(found)
            except StopIteration:
                return found

    wanted = [[i + 1 for i in ids(batch)] for batch in reader_of()]
    mapped = reader_of().map(interrupted)
    assert all_of(mapped) == wanted
    assert mapped.epoch == 1
    assert [ids(batch) for batch in mapped] == [[i + 1 for i in ids(b)] for b in _epoch(reader_of(), 1)]


def test_ctrl_c_during_the_wait_for_a_thread() -> None:
    go = threading.Event()

    def interrupt(*_: object) -> None:
        if not go.is_set():
            go.set()
            raise KeyboardInterrupt

    def waits(batch: dict[str, Any]) -> dict[str, Any]:
        # The main thread is in `next`. A signal just before it waits for a lock doesn't wake it up, so more follow.
        while not go.wait(0.02):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return with_y(batch)

    batches = iter(reader_of().map(waits, num_threads=1))
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert values(batches) == expected(reader_of())
    finally:
        signal.signal(signal.SIGINT, before)


def _epoch(reader: fastpipe.Reader, epoch: int) -> fastpipe.Reader:
    reader.set_epoch(epoch)
    return reader


def test_random_numbers_depend_on_seed_epoch_and_batch() -> None:
    wanted = list(reader_of().map(noisy, seed=5))
    assert len({tuple(numbers) for _, numbers in wanted}) == 9
    # The scheme never changes: key (seed, depth), counter (0, batch, 0, epoch).
    key, counter = np.array([5, 0], np.uint64), np.array([0, 3, 0, 0], np.uint64)
    fourth = np.random.Generator(np.random.Philox(key=key, counter=counter)).integers(2**60, size=2)
    assert wanted[3][1] == fourth.tolist() == [943004651046534081, 728136690385773638]
    for threads in (0, 1, 3):
        mapped = reader_of().map(noisy, seed=np.int64(5), num_threads=threads)
        assert list(mapped) == wanted
        assert [mapped.batch_at(step, 0) for step in range(9)] == wanted
        second = list(mapped)
        assert [mapped.batch_at(step, 1) for step in range(9)] == second
        assert not {tuple(b) for _, b in second} & {tuple(b) for _, b in wanted}
        for step in range(9):
            mapped.set_epoch(0)
            for _ in itertools.islice(mapped, step):
                ...
            mapped.load_state_dict(mapped.state_dict())
            if step:
                assert list(mapped) == wanted[step:]
        started = mapped._passes.batches(0, 2, 7)
        assert list(started.batches) == wanted[2:7]
    assert next(iter(reader_of().map(noisy, seed=6)))[1] != wanted[0][1]
    two = reader_of(epochs=2).map(noisy, seed=5, num_threads=2)
    assert list(two)[:9] == wanted


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_random_numbers_do_not_depend_on_the_number_of_ranks(order: dict[str, Any], threads: int) -> None:
    def mapped(**options: Any) -> Mapped:
        return reader_of(**order | options).map(noisy, seed=5, num_threads=threads)

    first, second = list(mapped()), list(mapped(epochs=2))[9:]
    for ranks in range(1, 5):
        for uneven in ("drop", "pad", "allow"):
            shards = [mapped(rank=rank, world_size=ranks, on_uneven=uneven) for rank in range(ranks)]
            numbers = [[numbers for _, numbers in shard] for shard in shards]
            dealt = [each for step in itertools.zip_longest(*numbers) for each in step if each is not None]
            wanted = {tuple(numbers) for _, numbers in first[: 9 // ranks * ranks if uneven == "drop" else 9]}
            # The ranks without a last batch repeat it with "pad".
            assert {tuple(each) for each in dealt} == wanted
            assert len(dealt) == len(wanted) or uneven == "pad"
            for shard, own in zip(shards, numbers, strict=True):
                assert [shard.batch_at(step, 0)[1] for step in range(len(own))] == own
        # The number of ranks changes in the middle of the epoch.
        for step in range(1, 9):
            before = mapped(on_uneven="allow")
            batches = iter(before)
            found = [next(batches) for _ in range(step)]
            for rank in range(ranks):
                after = mapped(rank=rank, world_size=ranks, on_uneven="allow")
                after.load_state_dict(through_json(before.state_dict()))
                found += after
            assert sorted(found) == sorted(first)
    # A rank with fewer batches continues with the next epoch.
    for rank in range(2):
        both = list(mapped(rank=rank, world_size=2, on_uneven="allow", epochs=2))
        assert [each for each in both if each in first] == both[: 5 - rank]
        assert [each for each in both if each in second] == both[5 - rank :]


def test_ranks_with_their_own_units_draw_different_random_numbers() -> None:
    pyarrow = pytest.importorskip("pyarrow")

    def of(rank: int) -> Mapped:
        schema = pyarrow.schema([pyarrow.field("x", "int64", nullable=False)])
        units = Slices(pyarrow.table({"x": range(54)}, schema), 9, schema)
        options: dict[str, Any] = {"shuffle": "block", "seed": 3, "shard_by": "block", "rank": rank, "world_size": 2}
        return fastpipe.read_units(units, batch_size=4, **options).map(noisy, seed=5)

    ranks = [list(of(rank)) for rank in range(2)]
    assert all(ranks)
    assert len({tuple(numbers) for rank in ranks for _, numbers in rank}) == sum(map(len, ranks))
    for rank in range(2):
        assert [of(rank).batch_at(step) for step in range(len(ranks[rank]))] == ranks[rank]


def test_notes_name_the_epoch_of_a_rank_with_fewer_batches() -> None:
    def fails(batch: dict[str, Any]) -> None:
        raise KeyError

    options: dict[str, Any] = {"rank": 1, "world_size": 2, "on_uneven": "allow", "epochs": 2}
    mapped = reader_of(**options).map(fails)
    with pytest.raises(KeyError) as caught:
        mapped.batch_at(0, 1)
    note = "The function of map() raised this error for the batch of epoch 1, step 0, rank 1."
    assert caught.value.__notes__ == [note]
    calls = itertools.count()
    mapped = reader_of(**options).map(lambda batch: fails(batch) if next(calls) == 4 else batch)
    with pytest.raises(KeyError) as caught:
        list(mapped)
    assert caught.value.__notes__ == [note]


def test_a_map_of_a_map() -> None:
    def more(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return batch | {"a": rng.integers(2**60)}

    def further(batch: dict[str, Any], rng: np.random.Generator) -> tuple[list[int], int, int]:
        return ids(batch), batch["a"], rng.integers(2**60)

    plain = [further(more(b, _rng(7, 0, s)), _rng(7, 1, s)) for s, b in enumerate(reader_of())]
    assert all(a != b for _, a, b in plain)
    for first, second in itertools.product((0, 2), repeat=2):
        inner = reader_of().map(more, num_threads=first, seed=7)
        outer = inner.map(further, num_threads=second, seed=7)
        assert outer.reader is inner
        assert isinstance(inner.reader, fastpipe.Reader)
        assert list(outer) == plain
        assert [outer.batch_at(step, 0) for step in range(9)] == plain
        for step in range(1, 9):
            outer.set_epoch(0)
            batches = iter(outer)
            assert [next(batches) for _ in range(step)] == plain[:step]
            outer.load_state_dict(through_json(outer.state_dict()))
            assert list(outer) == plain[step:]
        assert repr(outer).startswith("<fastpipe.Mapped of <map of <fastpipe.Reader of ")
        assert isinstance(outer.shard(2, 0).reader, Mapped)


def _rng(seed: int, depth: int, step: int) -> np.random.Generator:
    counter = np.array([0, step, 0, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, depth], np.uint64), counter=counter))


@pytest.mark.parametrize("threads", [0, 2])
def test_pickling(threads: int) -> None:
    mapped = reader_of().map(with_y, num_threads=threads, features=SPECS)
    batches = iter(mapped)
    first = [next(batches) for _ in range(2)]
    for pack in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"can't be pickled while a pass is active: close\(\) it first"):
            pack(mapped)
    mapped.close()
    again = pickle.loads(pickle.dumps(mapped))
    assert again.features == SPECS
    assert repr(again) == repr(mapped)
    assert values(again) == expected(reader_of(), 1)
    mapped.load_state_dict(mapped.state_dict())
    assert values(first) + values(pickle.loads(pickle.dumps(mapped))) == expected(reader_of())
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(reader_of().map(lambda batch: batch))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_forked_child_has_its_own_passes(threads: int) -> None:
    mapped = reader_of().map(with_y, num_threads=threads)
    batches = iter(mapped)
    next(batches)
    wanted = expected(reader_of(), 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(WAIT))
            with pytest.raises(fastpipe.errors.PassClosedError):
                next(batches)
            assert values(mapped) == wanted
            mapped.close()
            del batches, mapped
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert values(batches) == expected(reader_of())[1:]


def test_arguments() -> None:
    reader = reader_of()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"function": 3}, TypeError, "function must be a function of a batch; got int"),
        ({"num_threads": -1}, ValueError, "num_threads must be between 0 and 1024; got -1"),
        ({"num_threads": "2"}, TypeError, "num_threads must be an integer"),
        ({"num_threads": 2**40}, ValueError, "num_threads must be between"),
        ({"prefetch": -1}, ValueError, "prefetch must be between 0 and 1024"),
        ({"seed": -1}, ValueError, "seed must be between"),
        ({"seed": True}, TypeError, "seed must be an integer"),
        ({"features": ["x"]}, TypeError, "features must be a dict from name to spec"),
        ({"features": {"x": "int64"}}, TypeError, "feature 'x': expected a DenseSpec"),
    ]
    for options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            reader.map(**({"function": with_y} | options))
    mapped = reader_of(epochs=None).map(with_y)
    with pytest.raises(TypeError, match="no length"):
        len(mapped)
    assert len(list(itertools.islice(mapped, 25))) == 25
    assert reader.map(functools.partial(with_y)).features is None
    with pytest.raises(fastpipe.errors.StateError):
        mapped.load_state_dict({"version": 1})
    with pytest.raises(ValueError, match="index must be between"):
        mapped.shard(2, 2)


@pytest.mark.parametrize("threads", [0, 2])
def test_rebatching_rows_that_the_function_selects(threads: int) -> None:
    def selected(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"][batch["x"] % 3 > 0]}

    def repacked() -> fastpipe.Rebatcher:
        return fastpipe.Rebatcher(reader_of().map(selected, num_threads=threads), 4, shuffle_buffer=7, seed=1)

    wanted = [ids(batch) for batch in repacked()]
    assert sorted(itertools.chain(*wanted)) == [i for i in range(ROWS) if i % 3]
    for step in range(len(wanted) + 1):
        batches = repacked()
        assert [ids(next(batches)) for _ in range(step)] == wanted[:step]
        again = repacked()
        next(again)
        again.load_state_dict(through_json(batches.state_dict()))
        assert [ids(batch) for batch in again] == wanted[step:]


def test_leases(tmp_path: Any) -> None:
    from fastpipe.leases._ledger import lease

    mapped: Any = reader_of().map(_with_noise, seed=5, num_threads=2)
    options = {"stretch": 3, "ttl": 30.0, "prefetch": 1, "barrier": True, "copies": True, "patience": 600.0}
    with lease(mapped, f"sqlite:///{tmp_path}/ledger.db", worker_name="a", job="j", **options) as worker:
        found = []
        for batch in worker:
            found.append((ids(batch), batch["noise"].tolist()))
            worker.commit()
    assert found == [(ids(batch), batch["noise"].tolist()) for batch in reader_of().map(_with_noise, seed=5)]


def _with_noise(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return batch | {"noise": rng.random(len(batch["x"]))}
