"""Options that all readers share are documented, checked in one place, and shown by every function."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe._reader.options import Settings, takes_options

FUNCTIONS = [
    fastpipe.read_avro,
    fastpipe.read_csv,
    fastpipe.read_tfrecord,
    fastpipe.read_parquet,
    fastpipe.read_sql,
    fastpipe.read_arrow,
    fastpipe.read_units,
    fastpipe.from_arrow,
    fastpipe.from_arrays,
    fastpipe.recsys.read_interactions,
]
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def said_of(text: str) -> list[str]:
    """Returns the names of the arguments that a docstring documents."""
    return re.findall(r"^ {4}(\w+): ", inspect.cleandoc(text), re.MULTILINE)


NAMES = said_of(fastpipe.typing.Options.__doc__ or "")


def test_all_functions_take_the_options() -> None:
    """Checks that every public function that returns a reader accepts the options, unless it connects to a server or
    mixes readers, which have their own order.
    """
    public = [getattr(fastpipe, name) for name in fastpipe.__all__] + [fastpipe.recsys.read_interactions]
    made = {function for function in public if getattr(function, "__annotations__", {}).get("return") == "Reader"}
    assert made - {fastpipe.connect, fastpipe.mix} == set(FUNCTIONS)


@functions
def test_signatures_and_docstrings_show_every_option(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters)[-len(NAMES) :] == NAMES
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in NAMES)
    assert function.__doc__ is not None
    said = said_of(function.__doc__)
    for name in parameters:
        assert said.count(name) == 1, name
    assert "**options" not in function.__doc__
    assert "ForwardRef" not in str(inspect.signature(function))


@functions
def test_signatures_have_the_types_of_options(function: Callable[..., Any]) -> None:
    hints = typing.get_type_hints(function)
    assert hints["options"] == typing.Unpack[fastpipe.typing.Options]
    assert typing.get_type_hints(fastpipe.typing.Options).keys() == set(NAMES)


def test_every_option_is_documented_once() -> None:
    assert sorted(NAMES) == sorted(fastpipe.typing.Options.__annotations__)


@functions
def test_help_is_short_and_grouped(function: Callable[..., Any]) -> None:
    """Checks the help of a function in a terminal of 80 columns, which breaks longer lines."""
    lines = pydoc.plain(pydoc.render_doc(function)).splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= 250
    text = inspect.getdoc(function) or ""
    sections = re.findall(r"^(\w[\w ]*)\n\nArgs:\n((?: .*\n)+)", text, re.MULTILINE)
    groups = {title: re.findall(r"^ {4}(\w+): ", entries, re.MULTILINE) for title, entries in sections}
    assert list(groups) == ["What is read", "Order of the rows", "Ranks", "Resources"]
    assert "batch_size" in groups["What is read"]
    assert {"shuffle", "seed", "epochs"} < set(groups["Order of the rows"])
    assert groups["Ranks"] == ["rank", "world_size", "shard_by", "on_uneven"]
    assert groups["Resources"] == ["num_threads", "prefetch", "memory_limit", "progress"]


@functions
def test_defaults_match_the_signatures(function: Callable[..., Any]) -> None:
    shown = {name: inspect.signature(function).parameters[name].default for name in NAMES}
    none, all_ = Settings(function, 5, {}), Settings(function, 5, typing.cast("fastpipe.typing.Options", shown))
    assert none.running == all_.running
    assert none.ordering.with_seed(1) == all_.ordering.with_seed(1)
    assert none.ordering.shuffle == ("window" if function is fastpipe.recsys.read_interactions else "sequential")
    others = {name: inspect.signature(fastpipe.from_arrow).parameters[name].default for name in NAMES}
    assert shown == {**others, "shuffle": function is fastpipe.recsys.read_interactions}


@functions
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("shufle", "; did you mean 'shuffle'?"),
        ("num_thread", "; did you mean 'num_threads'?"),
        ("batchsize", "; did you mean 'batch_size'?"),
        ("workers", ": it takes "),
    ],
)
def test_misspelled_options_get_a_suggestion(function: Callable[..., Any], wrong: str, hint: str) -> None:
    data = fastpipe.recsys.Interactions.from_arrays(np.array([0, 0, 1]), np.array([0, 1, 2]))
    given: Any = data if function is fastpipe.recsys.read_interactions else {"x": np.arange(3)}
    name = function.__name__
    if function is fastpipe.from_arrow:
        given = fastpipe.to_arrow({"x": np.arange(3)})
    others = {"connection": "sqlite:///none.db"} if function is fastpipe.read_sql else {}
    with pytest.raises(TypeError, match=re.escape(f"{name}() got an unexpected keyword argument '{wrong}'{hint}")):
        function(given, batch_size=2, **others, **{wrong: 1})


def test_keywords_of_a_function_are_suggested() -> None:
    with pytest.raises(TypeError, match="'num_fetch'; did you mean 'num_fetches'"):
        fastpipe.read_parquet("x", batch_size=1, num_fetch=3)  # type: ignore[call-arg]


def test_options_documented_by_a_function_are_kept() -> None:
    @takes_options(seed=3)
    def read(x: int, **options: typing.Unpack[fastpipe.typing.Options]) -> Any:
        """Reads.

        Args:
            x: A number.
            seed: Seed of something else,
                described on two lines.
            **options: see `fastpipe.typing.Options`.

        Returns:
            It.
        """

    assert read.__doc__ is not None
    assert inspect.signature(read).parameters["seed"].default == 3
    before, after = read.__doc__.split("    drop_last: ")
    assert before.startswith("Reads.\n\nWhat is read\n\nArgs:\n    x: A number.\n\nOrder of the rows\n\nArgs:\n")
    assert before.endswith("    seed: Seed of something else,\n        described on two lines.\n")
    assert after.count("seed:") == 0
    assert after.endswith("(extra `progress`). Defaults to False.\n\nReturns:\n    It.")


def test_options_work_without_docstrings() -> None:
    program = "import fastpipe, inspect; print(fastpipe.read_avro.__doc__, inspect.signature(fastpipe.read_avro))"
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None (source: ")
    assert done.stdout.rstrip().endswith("progress: 'bool' = False) -> 'Reader'")
