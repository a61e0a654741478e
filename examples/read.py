"""Writes a small dataset as CSV, and reads it as shuffled batches: python examples/read.py"""

from __future__ import annotations

import tempfile
from pathlib import Path

import fastpipe

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "rides.csv")
    rows = [f"{row / 8},{('Graz', 'Linz', 'Wien')[row % 3]},{row % 5}\n" for row in range(1_000)]
    path.write_text("distance,city,stars\n" + "".join(rows))

    # Types are inferred. This prints them as Python code that you can edit and pass as features=.
    reader = fastpipe.read_csv(path, batch_size=256, shuffle=True, seed=7)
    print(reader.features)

    # A loop is one epoch. The next loop is the next epoch, in another order.
    for step, batch in enumerate(reader):
        distance, city = batch["distance"], batch["city"]
        print(step, distance.shape, distance.dtype, city.to_list()[:3])

    # Specs convert while the file is read, here each city to an index.
    cities = {"city": fastpipe.VocabularySpec(["Graz", "Linz", "Wien"], on_unknown="error")}
    reader = fastpipe.read_csv(path, overrides=cities, batch_size=256, shuffle=True, seed=7)
    good = reader.filter(fastpipe.col("stars") >= 3)
    print(good.num_rows, "rows with 3 or more stars;", next(iter(good))["city"][:3])
