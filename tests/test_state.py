"""States: a restored reader resumes exactly where the saved one was, at any position. Other states are refused."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from tqdm.auto import tqdm

import fastpipe
import samples
from samples import SHUFFLES, Data, order_of, through_json
from strategies import SOME, layouts, orders

# The last batch is a large part of the small datasets of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Writes 101 rows in two files."""
    return samples.write(tmp_path_factory.mktemp("state"), [samples.blocks_of(60), samples.blocks_of(41, (6, 0, 2))])


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(("epochs", "prefetch"), [(1, 1), (3, 6)])
def test_every_step_can_be_resumed(data: Data, shuffle: Any, epochs: int, prefetch: int) -> None:
    """Saves states while prefetched batches are pending."""
    reader = data.read(**order_of(shuffle), epochs=epochs, prefetch=prefetch, num_threads=2)
    states = [reader.state_dict()]
    expected = []
    batches = iter(reader)
    states.append(reader.state_dict())
    for batch in batches:
        expected.append(samples.digest(batch))
        states.append(reader.state_dict())
    assert len(expected) == 15 * epochs
    # `states[i + 1]` was saved after i batches.
    for step, state in enumerate(states[1:]):
        again = data.read(**order_of(shuffle), epochs=epochs, num_threads=1)
        again.load_state_dict(through_json(state))
        assert again.state_dict() == state
        assert again.epoch == step // 15
        assert samples.digests(again) == expected[step:], step
        assert again.epoch == epochs
    again = data.read(**order_of(shuffle), epochs=epochs)
    again.load_state_dict(states[0])
    assert samples.digests(again) == expected, "a state of a reader that was not started"


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(layouts, orders(), st.integers(1, 3), st.data())
def test_any_reader_can_be_restored(
    tmp_path: Path, files: list[list[int]], order: dict[str, Any], epochs: int, choose: st.DataObject
) -> None:
    data = samples.write(tmp_path, files)
    order = {"seed": 1, "columns": ["id"], "num_threads": 1, "epochs": epochs} | order
    expected = samples.digests(data.read(**order))
    found: list[str] = []
    state = None
    while True:
        # Saves and restores at several successive steps.
        reader = data.read(**order)
        if state is not None:
            reader.load_state_dict(through_json(state))
        batches = iter(reader)
        steps = choose.draw(st.integers(0, len(expected) + 1))
        found += samples.digests(itertools.islice(batches, steps))
        state = reader.state_dict()
        if steps == 0 or len(found) == len(expected):
            break
    assert found + samples.digests(batches) == expected


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_end_of_a_pass(data: Data, shuffle: Any) -> None:
    reader = data.read(**order_of(shuffle), epochs=2)
    batches = iter(reader)
    for _ in range(30):
        next(batches)
    unseen = reader.state_dict()
    assert next(batches, None) is None
    seen = reader.state_dict()
    reader.set_epoch(2)
    expected = samples.digests(reader)
    again = data.read(**order_of(shuffle), epochs=2)
    again.load_state_dict(through_json(unseen))
    # If a pass was left just before its end, a loop over the rest of the pass must not begin another pass.
    assert list(again) == []
    assert again.state_dict() == seen
    assert samples.digests(again) == expected, "the next pass"
    again.load_state_dict(through_json(seen))
    assert samples.digests(again) == expected


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_state_survives_an_unread_pass(data: Data, shuffle: Any) -> None:
    """Checks that calling `iter` twice keeps the state, as `tqdm.auto.tqdm` does."""
    reader = data.read(**order_of(shuffle))
    batches = iter(reader)
    next(batches)
    state, expected = reader.state_dict(), [batch["id"].tolist() for batch in batches]
    for begin in (iter, tqdm):
        restored = data.read(**order_of(shuffle))
        restored.load_state_dict(state)
        begin(restored)
        assert restored.state_dict() == state
        assert [batch["id"].tolist() for batch in tqdm(restored, disable=True)] == expected


class Expected:
    """Counts where a reader's next pass should start. Epochs have 15 batches, and passes have `epochs` epochs."""

    def __init__(self, epochs: int, whole: list[list[str]]) -> None:
        self.epochs, self.whole = epochs, whole
        # The first epoch of the next pass, and the epoch and step at which it starts. Also the expected `reader.epoch`.
        self.start, self.epoch = (0, 0, 0), 0
        self.saved = self.start

    def read(self, most: int) -> list[str]:
        """Returns the batches of a pass that is left after at most `most` batches."""
        first, epoch, step = self.start
        self.saved, self.epoch = self.start, epoch
        found: list[str] = []
        while len(found) < most and epoch < first + self.epochs:
            found.append(self.whole[epoch][step])
            self.epoch = epoch
            epoch, step = (epoch, step + 1) if step < 14 else (epoch + 1, 0)
            self.saved, self.start = (first, epoch, step), (self.epoch + 1, self.epoch + 1, 0)
        if len(found) < most:
            self.set(epoch)
        return found

    def set(self, epoch: int) -> None:
        self.epoch, self.start = epoch, (epoch, epoch, 0)
        self.saved = self.start

    def load(self) -> None:
        self.start, self.epoch = self.saved, self.saved[1]

    def copy(self) -> None:
        self.epoch = self.start[1]
        self.saved = self.start


class Epochs(list[list[str]]):
    """The batches of some epochs, with a short repr for Hypothesis."""

    def __repr__(self) -> str:
        return "<epochs>"


@pytest.fixture(scope="module")
def whole(data: Data) -> Epochs:
    reader = data.read(**order_of(True))
    return Epochs(samples.digests(reader) for _ in range(60))


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(
    st.integers(1, 2),
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.sampled_from([0, 1, 2, 14, 15, 16, 30, 31])),
            st.tuples(st.sampled_from(["load", "load elsewhere", "pickle", "shard"]), st.just(0)),
            st.tuples(st.just("set"), st.integers(0, 9)),
        ),
        max_size=8,
    ),
)
def test_where_the_next_pass_starts(data: Data, whole: Epochs, epochs: int, script: list[tuple[str, int]]) -> None:
    """Finishes passes, leaves them anywhere, or only begins them. In between, loads states, sets epochs and copies
    readers.
    """
    reader, expected = data.read(**order_of(True), epochs=epochs), Expected(epochs, whole)
    for what, number in [*script, ("read", 100)]:
        if what == "read":
            assert samples.digests(itertools.islice(reader, number)) == expected.read(number)
        elif what == "set":
            reader.set_epoch(number)
            expected.set(number)
        elif what in ("load", "load elsewhere"):
            state = through_json(reader.state_dict())
            if what == "load elsewhere":
                reader = data.read(**order_of(True), epochs=epochs)
            reader.load_state_dict(state)
            expected.load()
        else:
            reader.close()
            reader = reader.shard(1, 0) if what == "shard" else pickle.loads(pickle.dumps(reader))
            expected.copy()
        assert reader.epoch == expected.epoch, what


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@pytest.mark.parametrize("on_uneven", ["drop", "pad", "allow"])
def test_ranks_that_leave_at_different_steps_agree_on_the_epoch(data: Data, on_uneven: str) -> None:
    ranks = [data.read(**order_of(True), rank=rank, world_size=3, on_uneven=on_uneven) for rank in range(3)]
    for steps in ((1, 4, 5), (5, 2, 1)):
        for rank, most in zip(ranks, steps, strict=True):
            list(itertools.islice(rank, most))
    found = [samples.digests(rank) for rank in ranks]
    assert {rank.epoch for rank in ranks} == {3}
    for rank in ranks:
        rank.set_epoch(2)
    assert [samples.digests(rank) for rank in ranks] == found


class Failing:
    """Units of ten numbers. Reading one of the units fails the first time."""

    rows = (10,) * 6

    def __init__(self, unit: int) -> None:
        pa = pytest.importorskip("pyarrow")
        self.schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
        self.fails = unit

    def read(self, unit: int) -> Any:
        import pyarrow as pa

        if unit == self.fails:
            self.fails = -1
            raise ConnectionError("the server was away")
        return pa.record_batch([pa.array(range(10 * unit, 10 * unit + 10))], schema=self.schema)

    def fingerprint(self) -> str:
        return "numbers"


@pytest.mark.parametrize("unit", [0, 2])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_failed_pass(unit: int, resumes: bool) -> None:
    """Checks that a failed pass counts as an epoch if it yielded a batch, and that its state resumes with the failed
    batch.
    """
    reader = fastpipe.read_units(Failing(unit), batch_size=5, num_threads=1)
    found: list[int] = []
    with pytest.raises(ConnectionError, match="the server was away"):
        found.extend(row for batch in reader for row in batch["id"].tolist())
    assert found == list(range(10 * unit))
    assert reader.epoch == 0
    if resumes:
        reader.load_state_dict(reader.state_dict())
        assert found + [row for batch in reader for row in batch["id"].tolist()] == list(range(60))
        assert reader.epoch == 1
    else:
        list(reader)
        assert reader.epoch == (2 if unit else 1)


PROGRAM = """
    import json, sys
    import samples
    data = samples.Data(json.loads(sys.argv[1]), {})
    reader = data.read(**json.loads(sys.argv[2]))
    state = json.loads(sys.stdin.read())
    if state:
        reader.load_state_dict(state)
    batches = iter(reader)
    found = [samples.digest(next(batches)) for _ in range(int(sys.argv[3]))]
    print(json.dumps([found, reader.state_dict()]))
"""


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_another_process_resumes(data: Data, shuffle: Any) -> None:
    def elsewhere(state: dict[str, Any] | None, steps: int) -> tuple[list[str], dict[str, Any]]:
        arguments = [json.dumps(data.paths), json.dumps(order_of(shuffle)), str(steps)]
        found = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments],
            input=json.dumps(state),
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        assert found.returncode == 0, found.stderr
        digests, state = json.loads(found.stdout)
        return digests, state

    expected = samples.digests(data.read(**order_of(shuffle)))
    first, state = elsewhere(None, 4)
    second, state = elsewhere(state, 5)
    here = data.read(**order_of(shuffle))
    here.load_state_dict(state)
    assert first + second + samples.digests(here) == expected


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_threads_prefetch_columns_and_folders_may_differ(data: Data, shuffle: Any, tmp_path: Path) -> None:
    reader = data.read(**order_of(shuffle), num_threads=1, prefetch=1)
    batches = iter(reader)
    for _ in range(6):
        next(batches)
    state = reader.state_dict()
    rest = list(batches)
    elsewhere = [tmp_path / os.path.basename(path) for path in data.paths]
    for path, moved in zip(data.paths, elsewhere, strict=True):
        moved.write_bytes(Path(path).read_bytes())
    moved = Data([str(path) for path in elsewhere], {})
    for options in ({"num_threads": 4, "prefetch": 9}, {"columns": ["items", "id"]}):
        again = moved.read(**order_of(shuffle), **options)
        again.load_state_dict(state)
        found = list(again)
        for batch, wanted in zip(found, rest, strict=True):
            wanted = {name: wanted[name] for name in batch}
            assert samples.digest(batch) == samples.digest(wanted)


def test_a_generated_seed_is_restored_from_the_state(data: Data) -> None:
    reader = data.read(shuffle=True, batch_size=7)
    batches = iter(reader)
    next(batches)
    state = through_json(reader.state_dict())
    again = data.read(shuffle=True, batch_size=7)
    assert again.seed != reader.seed
    again.load_state_dict(state)
    assert again.seed == reader.seed
    assert samples.digests(again) == samples.digests(batches)
    assert samples.digests(pickle.loads(pickle.dumps(again))) == samples.digests(reader), "the next epoch"


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_loading_closes_the_active_pass_but_keeps_its_batches(data: Data, shuffle: Any) -> None:
    reader = data.read(**order_of(shuffle))
    next(iter(reader))
    state = reader.state_dict()
    reader.set_epoch(5)
    active = iter(reader)
    kept = next(active)
    before = samples.digest(kept)
    reader.load_state_dict(state)
    with pytest.raises(fastpipe.FastpipeError, match="closed"):
        next(active)
    assert samples.digest(kept) == before
    assert reader.epoch == 0
