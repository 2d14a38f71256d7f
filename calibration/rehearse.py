"""Every CUDA script from begin to end on a device that does nothing: is there a path that crashes?

    python -m calibration.rehearse > docs/calibration-rehearsal.log

For a driver in which kernels do nothing, so that times mean nothing and none is printed. NCCL is not there either:
collectives run over torch's "fake" group of eight ranks, of which this process is the first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from calibration.measure import ranks
from calibration.measure.campaign import plan, run
from calibration.measure.case import Case
from calibration.measure.device import open_device
from calibration.measure.families import FAMILIES, cases_of, readings_of
from calibration.measure.points import FigurePoint, PointFile, read_points
from calibration.own.profile import write_profile
from sim.cost.own import load_own_profile

RANKS = 8
MINUTES = 10.0


def main() -> None:
    device = open_device("cuda")
    print(
        f"torch {torch.__version__}, {device.info().title}, {device.info().devices} devices; {RANKS} ranks of a fake group"
    )
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    ranks.agreed = lambda value: value  # the other ranks do not exist, so nothing can be agreed with them
    ranks.slowest = lambda measured: measured
    with tempfile.TemporaryDirectory() as folder:
        points = PointFile(Path(folder) / "rehearsal.points.jsonl", device.info().as_dict())
        for family in FAMILIES:
            planned = plan([], [cases_of(family, device)], readings_of(family, device))
            report = run(device, planned, points, MINUTES)
            kernels = sorted({entry.name for entry in planned.entries if isinstance(entry, Case)})
            print(f"\n{family}: {report.measured} of {len(planned.entries)} measured")
            for name in kernels:
                print(f"  {name}")
            print("".join(f"  not measured: {reason}\n" for reason in report.left_out), end="")
        info, found = read_points(points.path)
        for point in found:
            if isinstance(point, FigurePoint):
                print(f"  read: {point.figure}")
        result = write_profile(Path(folder) / "rehearsal.yaml", info, found)
        profile = load_own_profile(Path(folder) / "rehearsal.yaml")
        print(
            f"\nprofile: {len(result.figures)} figures, {len(profile.measured)} measured shapes, {len(result.plots)} plots"
        )


if __name__ == "__main__":
    main()
