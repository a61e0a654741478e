"""The examples in docstrings of public names run, and the main names have one."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastpipe
import manual

# Names whose documentation should include an example.
MAIN = [
    fastpipe.avro.AvroFile,
    fastpipe.DenseSpec,
    fastpipe.recsys.Interactions,
    fastpipe.Masked,
    fastpipe.Ragged,
    fastpipe.RaggedSpec,
    fastpipe.Reader,
    fastpipe.Reader.batch_at,
    fastpipe.Reader.describe,
    fastpipe.Reader.load_state_dict,
    fastpipe.Reader.locate,
    fastpipe.Reader.rebatch,
    fastpipe.Reader.resume_appended,
    fastpipe.Reader.sample,
    fastpipe.Reader.shard,
    fastpipe.Reader.state_dict,
    fastpipe.Reader.take,
    fastpipe.Reader.to_reader,
    fastpipe.Sparse,
    fastpipe.batch.SparseCSR,
    fastpipe.SparseSpec,
    fastpipe.Strings,
    fastpipe.recsys.evaluation_candidates,
    fastpipe.recsys.hit_rate,
    fastpipe.infer_features,
    fastpipe.recsys.ndcg,
    fastpipe.read_avro,
    fastpipe.recsys.read_interactions,
    fastpipe.typing.Rebatcher,
    fastpipe.shuffle_report,
    fastpipe.to_arrow,
]


def examples() -> Iterator[doctest.DocTest]:
    """Yields the examples of all public names and of the methods of public classes."""
    finder = doctest.DocTestFinder(recurse=False)
    public_names = [(name, getattr(fastpipe, name)) for name in fastpipe.__all__]
    public_names += [(f"metrics.{name}", getattr(fastpipe.metrics, name)) for name in fastpipe.metrics.__all__]
    for name, public in public_names:
        names = {name: public}
        if inspect.isclass(public):
            names |= {f"{name}.{method}": value for method, value in vars(public).items() if method[0] != "_"}
        for path, value in names.items():
            yield from (test for test in finder.find(value, path, module=False) if test.examples)


EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docstrings")
    manual.write(folder)
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples(example: doctest.DocTest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    example.globs = {}
    said: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.DocTestRunner(optionflags=options).run(example, out=said.append)
    assert found.failed == 0, "".join(said)


@pytest.mark.parametrize("public", MAIN, ids=lambda public: public.__qualname__)
def test_main_names_have_an_example(public: object) -> None:
    text = inspect.getdoc(public) or ""
    assert doctest.DocTestParser().get_examples(text)
