"""Trains a linear model with PyTorch, with a part for validation: python examples/train.py"""

from __future__ import annotations

import numpy as np
import torch

import fastpipe
import fastpipe.torch

random = np.random.default_rng(1)
x = random.standard_normal((20_000, 8), "float32")
arrays = {"x": x, "y": x @ np.arange(8, dtype="float32") + 1}

# read_avro, read_csv, read_parquet and the other functions have the same arguments for the order and the batches.
reader = fastpipe.from_arrays(arrays, batch_size=256, shuffle=True, seed=7)
train, valid = (fastpipe.torch.dataset(part) for part in reader.split(0.9, 0.1))

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(5):
    for batch in train:
        loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        errors = torch.cat([model(batch["x"])[:, 0] - batch["y"] for batch in valid])
    print(f"epoch {epoch}: validation error {errors.square().mean():.4f}")
