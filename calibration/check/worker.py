"""One process of the check on a GPU: one strategy on one rank. `calibration.check.processes` starts it.

python -m calibration.check.worker scenario.yaml STRATEGY FOLDER --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch.distributed as dist

from calibration.check.bench import BENCHES
from calibration.check.step import TrainingStep
from calibration.measure.ranks import end
from sim.api import load

WARM_UP_STEPS, STEPS = 3, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", type=Path)
    parser.add_argument("strategy")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=sorted(BENCHES), required=True)
    given = parser.parse_args()
    setup = next(s for s in load(given.scenario).strategies if s.name == given.strategy)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    bench = BENCHES[given.device](int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        dist.init_process_group(bench.backend)
    step = TrainingStep(setup, bench.device)
    for _ in range(WARM_UP_STEPS):
        step()
    found = {"step_ns": [bench.time_ns(step) for _ in range(STEPS)]}
    allocated, reserved = bench.peaks(step)
    found |= {"allocated_bytes": allocated, "reserved_bytes": reserved}
    if rank == 0:
        bench.trace(step, given.folder)
    elif ranks > 1:
        step()  # the first rank's traced step meets it
    (given.folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    end(0)


if __name__ == "__main__":
    main()
