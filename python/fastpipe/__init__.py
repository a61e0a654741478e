"""fastpipe loads Avro, CSV, Parquet, Arrow, SQL results and in-memory tables as shuffled batches of NumPy arrays.

    import fastpipe

    for batch in fastpipe.read_avro("data/*.avro", batch_size=1024):
        batch["user_embedding"]  # numpy float32 [1024, 64]
        batch["clicked_items"]   # fastpipe.Ragged(values, offsets)

`read_csv`, `read_parquet`, `read_arrow`, `read_tfrecord`, `read_sql`, `read_units` (custom sources), `from_arrow` and
`from_arrays` (in-memory tables) work in the same way. `write_avro` writes Avro files.

Importing fastpipe imports no package other than NumPy.
"""

from __future__ import annotations

# Imported eagerly, so that importing fastpipe fails if the extension is broken.
from fastpipe._fastpipe import __version__ as __version__
from fastpipe._lazy import lazily

# These modules import packages that may not be installed.
__getattr__, __dir__, __all__ = lazily(__name__, hidden={"cuda", "jax", "ray", "tf", "torch", "xgboost"})
