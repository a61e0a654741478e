"""Stops in the middle of an epoch, and resumes, also on two ranks: python examples/resume.py"""

from __future__ import annotations

import json

import numpy as np

import fastpipe


def read(**ranks: int) -> fastpipe.Reader:
    """Returns the same dataset in the same order, as a new process would."""
    rows = {"id": np.arange(1_000)}
    return fastpipe.from_arrays(rows, batch_size=100, shuffle=True, seed=7, **ranks)


reader = read()
for step, batch in enumerate(reader):
    print("step", step, "begins with row", batch["id"][0])
    if step == 3:
        state = json.dumps(reader.state_dict())  # save it with the model
        break

resumed = read()
resumed.load_state_dict(json.loads(state))
print("one rank resumes with", [int(batch["id"][0]) for batch in resumed])

for rank in range(2):
    part = read(rank=rank, world_size=2)
    part.load_state_dict(json.loads(state))
    print(f"rank {rank} of 2 resumes with", [int(batch["id"][0]) for batch in part])
