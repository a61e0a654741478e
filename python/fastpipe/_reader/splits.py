"""Splits, folds, and leaving rows out: which rows each reader gets. `selection.py` makes the readers.

The side of a row is a pure function of a seed and of the row's key, which is the value of a column or the row's place.
So a row keeps its side when data is added. Let h be the XXH3 hash (64 bits) of the key with the seed:

- a key that is an integer, a bool, a date, a time or a duration: its eight bytes as int64, the lowest first,
- a key that is text or bytes: its bytes, for text in UTF-8. A code of a category counts as the category's text,
- null and NaT: no bytes, with seed + 1 (modulo 2^64),
- a row of a file: its index in the file as int64, with the hash of the file's name as the seed,
- a row of a source without files: its index as int64.

With fractions f_0, f_1, ... and thresholds t_i = floor(2^64 (f_0 + ... + f_i)), computed exactly, the row belongs to
the first part i with h < t_i, or to the last part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown, within
from fastpipe._fastpipe import hash_integers, hash_texts
from fastpipe._reader.dataset import Dataset, DerivedDataset, FileDataset
from fastpipe._reader.ordering import Ordering
from fastpipe._reader.selection import check, select
from fastpipe.batch import Masked, Strings
from fastpipe.errors import SchemaError
from fastpipe.specs import DenseSpec, RaggedSpec, SparseSpec

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

_Hashes = npt.NDArray[np.uint64]

_LARGEST_SEED = 2**64 - 1
# Each part has a bit for each row.
_MOST_PARTS = 2**16
# Number of rows that are hashed at once.
_ROWS = 1 << 16


def split(reader: Reader, fractions: Sequence[float], by: str | None, seed: int) -> tuple[Reader, ...]:
    """Divides a reader's rows into parts. See `Reader.split`."""
    check(reader, "split")
    exact = [_fraction(fraction) for fraction in fractions]
    if not 1 <= len(exact) <= _MOST_PARTS:
        raise ValueError(f"split() needs 1 to {_MOST_PARTS} fractions, such as split(0.9, 0.1); got {len(exact)}")
    total = sum(exact, Fraction(0))
    if abs(total - 1) > Fraction(1, 10**9):
        given = ", ".join(map(str, fractions))
        raise ValueError(
            f"fractions must sum to 1; {given} sum to {float(total):.9g}. Add a fraction for the remaining rows, or"
            " divide each fraction by the sum"
        )
    hashes = _hashes(reader, "by", by, within("seed", seed, 0, _LARGEST_SEED))
    sides = sides_of(hashes, reader._data.handle.num_rows, exact)
    key = _key(by, seed)
    return tuple(
        select(
            reader, sides == side, method=("split", f"part {side} of {len(exact)}, fraction {fractions[side]:g}, {key}")
        )
        for side in range(len(exact))
    )


def folds(
    reader: Reader, num_folds: int, by: str | None, stratify: str | None, seed: int
) -> list[tuple[Reader, Reader]]:
    """Divides a reader's rows for cross-validation. See `Reader.folds`."""
    check(reader, "folds")
    count = within("num_folds", num_folds, 2, _MOST_PARTS)
    number = within("seed", seed, 0, _LARGEST_SEED)
    if by is not None and stratify is not None:
        raise ValueError("pass either by or stratify, not both: rows with equal keys must not be in different folds")
    if stratify is not None:
        strata, places = column_hashes(reader, "stratify", stratify, number), _place_hashes(reader._data, number)
        sides = dealt(_joined(strata), _joined(places), count)
    else:
        hashes = _hashes(reader, "by", by, number)
        sides = sides_of(hashes, reader._data.handle.num_rows, [Fraction(1, count)] * count)
    key = _key(by, seed) if stratify is None else f"stratify={stratify!r}, seed={seed}"
    return [
        (
            select(reader, sides != side, method=("folds", f"all but fold {side} of {count}, {key}")),
            select(reader, sides == side, method=("folds", f"fold {side} of {count}, {key}")),
        )
        for side in range(count)
    ]


def _key(by: str | None, seed: int) -> str:
    return f"by {'the place of the row' if by is None else repr(by)}, seed={seed}"


def without(reader: Reader, rows: npt.ArrayLike) -> Reader:
    """Leaves out rows by index. See `Reader.without`."""
    check(reader, "without")
    numbers, there = np.asarray(rows), reader._data.handle.num_rows
    if numbers.ndim == 1 and not numbers.size:
        numbers = numbers.astype(np.int64)
    if numbers.dtype == object or numbers.dtype.kind not in "iu":
        raise TypeError(f"rows must be a list or an array of integers; got {shown(rows)}")
    if numbers.ndim != 1:
        raise ValueError(f"rows must be a list of numbers; got shape {numbers.shape}")
    wrong = (numbers < 0) | (numbers >= there)
    if wrong.any():
        raise ValueError(f"row {numbers[wrong][0]} does not exist in {there} rows")
    kept = np.ones(there, np.bool_)
    kept[numbers] = False
    return select(reader, kept, method=("without", "rows by index"))


def _fraction(value: Any) -> Fraction:
    """Returns a fraction of rows exactly.

    Raises:
        TypeError: If the value isn't a number.
        ValueError: If it isn't between 0 and 1.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"fractions must be numbers, such as split(0.9, 0.1); got {shown(value)}")
    number = Fraction(value) if isinstance(value, Rational) else float(value)
    if not 0 < number <= 1:
        raise ValueError(f"each fraction must be above 0 and at most 1; got {shown(value)}")
    return Fraction(number)


def sides_of(hashes: Iterable[_Hashes], rows: int, fractions: Sequence[Fraction]) -> npt.NDArray[Any]:
    """Returns the index of each row's part, uint8 or uint16 `[rows]`, from the hashes of consecutive rows."""
    thresholds = [int(sum_ * 2**64) for sum_ in itertools.accumulate(fractions[:-1])]
    # No hash reaches 2^64, so parts after such a threshold have no rows.
    reached = np.array([threshold for threshold in thresholds if threshold < 2**64], np.uint64)
    sides = np.empty(rows, np.uint8 if len(fractions) <= 2**8 else np.uint16)
    at = 0
    for some in hashes:
        sides[at : at + len(some)] = np.searchsorted(reached, some, side="right")
        at += len(some)
    assert at == rows, "a row has no hash"
    return sides


def dealt(strata: npt.NDArray[Any], keys: _Hashes, count: int) -> npt.NDArray[Any]:
    """Deals the rows of each stratum to folds in turn, in the order of their keys.

    Dealing continues with the next fold at the next stratum. So the sizes of the folds differ by at most one row, in
    each stratum and in all.
    """
    sides = np.empty(len(keys), np.int64)
    sides[np.lexsort((keys, strata))] = np.arange(len(keys)) % count
    return sides


def _joined(hashes: Iterable[_Hashes]) -> _Hashes:
    return np.concatenate([np.zeros(0, np.uint64), *hashes])


def _hashes(reader: Reader, what: str, column: str | None, seed: int) -> Iterator[_Hashes]:
    """Yields the hash of each row's key, which is the value of a column or, without a column, the row's place.

    Each array has the hashes of consecutive rows, so that only the sides of all rows are in memory at once.
    """
    return _place_hashes(reader._data, seed) if column is None else column_hashes(reader, what, column, seed)


def _place_hashes(data: Dataset, seed: int) -> Iterator[_Hashes]:
    """Yields the hash of each row's place, for consecutive rows.

    Raises:
        ValueError: If several files have the same name.
    """
    if isinstance(data, DerivedDataset):
        whole, chosen = data.origin()
        if isinstance(chosen, slice) or chosen.dtype == np.bool_:
            at = 0
            for hashes in _place_hashes(whole, seed):
                yield hashes[_shifted(chosen, at, len(hashes))]
                at += len(hashes)
        else:
            yield _hashes_at(_place_hashes(whole, seed), chosen)
        return
    for rows, place_seed in _places(data, seed):
        for start in range(0, rows, _ROWS):
            yield hash_integers(np.arange(start, min(start + _ROWS, rows)), place_seed)


def _hashes_at(all_hashes: Iterable[_Hashes], rows: npt.NDArray[np.int64]) -> _Hashes:
    """Returns the hashes of rows by index, of the hashes of all rows."""
    found, order, at = np.empty(len(rows), np.uint64), np.argsort(rows), 0
    ascending = rows[order]
    for hashes in all_hashes:
        first, last = np.searchsorted(ascending, [at, at + len(hashes)])
        found[order[first:last]] = hashes[ascending[first:last] - at]
        at += len(hashes)
    return found


def _shifted(chosen: slice | npt.NDArray[np.bool_], at: int, rows: int) -> slice | npt.NDArray[np.bool_]:
    """Returns an index of the chosen ones of `rows` rows from row `at` on."""
    if isinstance(chosen, slice):
        return slice(max(chosen.start - at, 0), max(chosen.stop - at, 0))
    return chosen[at : at + rows]


def _places(data: Dataset, seed: int) -> list[tuple[int, int]]:
    """Returns the number of rows of each file, and the seed of the hashes of their indices.

    Raises:
        ValueError: If several files have the same name.
    """
    if not isinstance(data, FileDataset):
        return [(data.handle.num_rows, seed)]
    rows_of_files = np.zeros(len(data.files), np.int64)
    np.add.at(rows_of_files, data.unit_files(), data.handle.unit_rows())
    found, paths = [], dict[str, str]()
    for path, rows in zip(data.files, rows_of_files.tolist(), strict=True):
        name = _place_name(path)
        if (other := paths.setdefault(name, path)) != path:
            raise ValueError(
                f"the files {other} and {path} have the same name, so the places of their rows aren't unique: pass the"
                " name of a column, by=..., or rename one of the files"
            )
        found.append((rows, int(_hash_of_text(name, seed))))
    return found


def _place_name(path: str) -> str:
    """Returns the name of a file without folders, except for folders such as `day=1` directly above the file."""
    *folders, name = path.replace("\\", "/").split("/")
    while folders and "=" in folders[-1]:
        name = f"{folders.pop()}/{name}"
    return name


def _hash_of_text(text: str, seed: int) -> np.uint64:
    data = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    hashed: np.uint64 = hash_texts(data, np.array([0, len(data)]), seed)[0]
    return hashed


def column_hashes(reader: Reader, what: str, column: str, seed: int) -> Iterator[_Hashes]:
    """Yields the hash of a column's value in each row, for consecutive rows. Reads all rows once.

    Args:
        reader: The reader.
        what: Name of the argument, for errors.
        column: Name of a feature.
        seed: Seed of the hash.

    Raises:
        SchemaError: If the feature doesn't exist, or if it isn't a column of integers, bools, times, text or bytes.
    """
    if not isinstance(column, str):
        raise TypeError(f"{what} must be the name of a feature; got {shown(column)}")
    if column not in reader.features:
        known = ", ".join(map(repr, reader.features))
        reason = f"{what}={column!r} is not a feature: the reader has {known}. Add it to columns= or features="
        raise SchemaError(reason, feature=column)
    spec = reader.features[column]
    if isinstance(spec, (RaggedSpec, SparseSpec)) or (isinstance(spec, DenseSpec) and spec.shape):
        raise _no_key(what, column, "has several values per row")
    if spec.dtype.startswith("float"):
        raise _no_key(what, column, f"has the dtype {spec.dtype}, and equal keys may be rounded differently")
    texts = reader.categories.get(column)
    of_categories = None if texts is None else np.array([_hash_of_text(text, seed) for text in texts], np.uint64)
    # With a limit, batches have the size for which the limit was chosen.
    size = _ROWS if reader._running.memory_limit is None else reader.batch_size
    ordering, running = Ordering.checked(batch_size=size, seed=reader.seed), reader._running.strict
    with reader._like(reader._data.narrowed([column]), ordering=ordering, running=running, epochs=1) as all_rows:
        for batch in all_rows:
            values, valid = batch[column], None
            if isinstance(values, Masked):
                values, valid = values.values, values.valid
            hashes = _value_hashes(what, column, values, seed)
            if of_categories is not None:
                known_codes = (values >= 0) & (values < len(of_categories))
                hashes[known_codes] = of_categories[values[known_codes]]
            if valid is not None:
                hashes[~valid] = _hash_of_null(seed)
            yield hashes


def _value_hashes(what: str, column: str, values: Any, seed: int) -> _Hashes:
    """Returns the hash of each value of an array."""
    if isinstance(values, Strings) and len(values.shape) == 1:
        return hash_texts(values.values, values.offsets, seed)
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise _no_key(what, column, "has several values per row")
    if values.dtype.kind in "mM":
        hashes = hash_integers(np.ascontiguousarray(values.view(np.int64)), seed)
        hashes[np.isnat(values)] = _hash_of_null(seed)
        return hashes
    if values.dtype.kind not in "biu":
        raise _no_key(what, column, f"has the dtype {values.dtype}")
    return hash_integers(np.ascontiguousarray(values.astype(np.int64)), seed)


def _hash_of_null(seed: int) -> np.uint64:
    return _hash_of_text("", (seed + 1) % 2**64)


def _no_key(what: str, column: str, reason: str) -> SchemaError:
    advice = "use a column of integers, bools, dates, text or bytes, or omit it to use the place of each row"
    return SchemaError(f"{what}={column!r} {reason}: {advice}", feature=column)
