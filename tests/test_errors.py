from __future__ import annotations

import copy
import errno
import pickle

import pytest

import fastpipe
from fastpipe import errors

BUILTINS = {
    "DeviceError": RuntimeError,
    "MalformedFileError": ValueError,
    "DamageError": ValueError,
    "LimitError": ValueError,
    "SchemaError": ValueError,
    "UnsupportedError": ValueError,
    "ShapeError": ValueError,
    "StateError": ValueError,
    "ValueRangeError": ValueError,
    "NullValueError": ValueError,
    "OutOfMemoryError": MemoryError,
    "PassClosedError": RuntimeError,
    "InteractionsError": ValueError,
    "UnseenItemsError": ValueError,
    "MissingFileError": FileNotFoundError,
    "StorageError": OSError,
    "LedgerError": OSError,
    "ServiceError": OSError,
    "StaleLeaseError": RuntimeError,
    "WorkerError": RuntimeError,
    "FastpipeError": Exception,
}
WHERE = {"path": "a.avro", "block": 3, "offset": 512, "record": 7, "feature": "x", "reason": "too long"}


@pytest.mark.parametrize("name", BUILTINS)
def test_errors_inherit_from_builtins(name: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, fastpipe.FastpipeError)
    assert issubclass(cls, BUILTINS[name])
    assert cls.__doc__


def test_every_error_is_named() -> None:
    assert sorted([*BUILTINS, "ColumnsLeftOutWarning", "RowsLeftOutWarning"]) == errors.__all__


@pytest.mark.parametrize("name", BUILTINS)
def test_errors_have_a_location(name: str) -> None:
    error = getattr(errors, name)("feature 'x': too long (file a.avro, block 3)", **WHERE)
    assert str(error) == "feature 'x': too long (file a.avro, block 3)"
    assert {key: getattr(error, key) for key in WHERE} == WHERE


@pytest.mark.parametrize("name", BUILTINS)
def test_unknown_attributes_are_none(name: str) -> None:
    error = getattr(errors, name)("too long")
    assert error.reason == str(error) == "too long"
    assert all(getattr(error, key) is None for key in WHERE if key != "reason")


@pytest.mark.parametrize("name", BUILTINS)
def test_pickled_and_copied_errors_are_equal(name: str) -> None:
    error = getattr(errors, name)("too long (file a.avro)", **WHERE)
    error.add_note("while testing")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.__notes__ == ["while testing"]


def test_missing_files_look_like_those_of_open() -> None:
    error = fastpipe.errors.MissingFileError("no such file (file a.avro)", path="a.avro")
    assert (error.errno, error.filename) == (errno.ENOENT, "a.avro")
    assert str(error) == "no such file (file a.avro)"


def test_storage_errors_have_an_errno() -> None:
    error = fastpipe.errors.StorageError("permission denied (file a.avro)", path="a.avro")
    assert error.errno is None
    error.errno = errno.EACCES
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.filename) == (errno.EACCES, "a.avro")
    assert str(again) == "permission denied (file a.avro)"
