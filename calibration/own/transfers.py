"""Fits of collectives, sends and copies; figures of host, links and overlap as they were read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from calibration.fit.collectives import predict_us, two_protocols
from calibration.fit.evidence import Floats
from calibration.fit.solve import fit
from calibration.measure.points import FigurePoint, TimedPoint
from calibration.own.result import LEAST_SIGMA, TOLERANCE, Evidence, OwnFit
from sim.cost.collective import nic_bytes, ring_steps, wire_bytes
from sim.cost.figures import Figure
from sim.program.kernels import Collective, HostCopy

TWO_PROTOCOLS_NEEDED = 6
LATENCY_BOUNDS = {"latency_us": (10.0, 0.01, 1e6), "gb_per_s": (10.0, 1e-4, 5000.0)}
HOP_BOUNDS = {"hop_us": (15.0, 0.1, 1e6), "gb_per_s": (25.0, 1e-4, 5000.0)}
COPY_BOUNDS = {"fixed_us": (10.0, 0.001, 1e5), "gb_per_s": (20.0, 1e-3, 5000.0)}
READ = ("host.", "host_link.", "overlap.")
SEND = "ring_exchange"


def fit_collectives(evidence: Evidence, result: OwnFit) -> None:
    """Protocols by kind and number of ranks inside a node, hops and adapters across nodes, sends."""
    inside: dict[tuple[str, int], list[TimedPoint]] = defaultdict(list)
    across: list[TimedPoint] = []
    for point in evidence.timed:
        if isinstance(point.work, Collective):
            nodes = nodes_of(point)
            if nodes > 1:
                across.append(point)
            else:
                inside[point.work.kind, point.work.size].append(point)
    for (kind, size), points in sorted(inside.items()):
        if kind == SEND:
            _fit_sends(evidence, result, points)
        else:
            _fit_protocols(evidence, result, kind, size, points)
    _fit_hops(evidence, result, [p for p in across if p.work.size == nodes_of(p)])  # type: ignore[union-attr]


def nodes_of(point: TimedPoint) -> int:
    found = re.match(r"(\d+) nodes", point.variant)
    return int(found[1]) if found else 1


def _wire(points: Sequence[TimedPoint]) -> Floats:
    works = [point.work for point in points]
    return np.array([wire_bytes(w.kind, w.bytes, w.size) for w in works if isinstance(w, Collective)], float)


def _fit_protocols(evidence: Evidence, result: OwnFit, kind: str, size: int, points: Sequence[TimedPoint]) -> None:
    wire, measured = _wire(points), evidence.ns(points)
    if len(points) >= TWO_PROTOCOLS_NEEDED:
        found = two_protocols(wire, measured / 1e3)
    else:
        line = fit(lambda latency_us, gb_per_s: latency_us + wire / gb_per_s / 1e3, measured / 1e3, LATENCY_BOUNDS)
        found = {"low_latency_us": line["latency_us"], "low_latency_gb_per_s": line["gb_per_s"]}
        found |= {"bandwidth_us": line["latency_us"], "bandwidth_gb_per_s": line["gb_per_s"]}
    predicted = predict_us(wire, **found) * 1e3
    result.ship(evidence, f"collective.{kind}.n{size}", found, predicted, measured)
    result.plot("collectives", f"{kind} of {size}", wire, predicted, measured, "bytes on the wire")


def _fit_sends(evidence: Evidence, result: OwnFit, points: Sequence[TimedPoint]) -> None:
    size, measured = _sizes(points), evidence.ns(points)

    def predict(latency_us: float, gb_per_s: float) -> Floats:
        return np.asarray(latency_us + size / gb_per_s / 1e3)

    found = fit(predict, measured / 1e3, LATENCY_BOUNDS, tolerance=TOLERANCE)
    values = {"node_latency_us": found["latency_us"], "node_gb_per_s": found["gb_per_s"]}
    result.ship(evidence, "p2p", values, predict(**found) * 1e3, measured)
    result.plot("collectives", "sends", size, predict(**found) * 1e3, measured, "bytes")


class _Span:
    """One rank on each of so many nodes."""

    def __init__(self, nodes: int) -> None:
        self.size, self.nodes, self.ranks_per_node = nodes, nodes, 1


def _fit_hops(evidence: Evidence, result: OwnFit, points: Sequence[TimedPoint]) -> None:
    """Groups of one rank per node: every step waits one hop, the adapter carries the rest. Both protocols alike."""
    works = [p.work for p in points if isinstance(p.work, Collective) and p.work.kind != SEND]
    points = [p for p in points if isinstance(p.work, Collective) and p.work.kind != SEND]
    if len(points) < 2:
        return
    sent = np.array([nic_bytes(w.kind, w.bytes, _Span(w.size)) for w in works], float)
    steps = np.array([ring_steps(w.kind, "bandwidth", w.size) for w in works], float)
    measured = evidence.ns(points)

    def predict(hop_us: float, gb_per_s: float) -> Floats:
        return np.asarray(steps * hop_us + sent / gb_per_s / 1e3)

    found = fit(predict, measured / 1e3, HOP_BOUNDS, tolerance=TOLERANCE)
    fraction = found["gb_per_s"] * 1e9 / evidence.facts.gpu.node.network_bytes_per_s
    for protocol in ("low_latency", "bandwidth"):
        values = {"hop_us": found["hop_us"], "nic_fraction": fraction}
        result.ship(evidence, f"inter_node.{protocol}", values, predict(**found) * 1e3, measured)
    result.plot("collectives", "across nodes", sent, predict(**found) * 1e3, measured, "bytes to other nodes")


def fit_copies(evidence: Evidence, result: OwnFit) -> None:
    """Each way's bandwidth from pinned copies, one fixed time, and what pageable memory leaves of the bandwidth."""
    by_way: dict[tuple[str, bool], list[TimedPoint]] = defaultdict(list)
    for point in evidence.timed:
        if isinstance(point.work, HostCopy):
            by_way[point.work.direction, point.work.pinned].append(point)
    ways = [(way, points) for (way, pinned), points in by_way.items() if pinned]
    if not ways:
        return
    sizes, measured = [_sizes(points) for _, points in ways], [evidence.ns(points) for _, points in ways]

    def predict(fixed_us: float, **rates: float) -> Floats:
        return np.concatenate([fixed_us * 1e3 + size / rates[way] for (way, _), size in zip(ways, sizes)])

    bounds = {"fixed_us": COPY_BOUNDS["fixed_us"], **{way: COPY_BOUNDS["gb_per_s"] for way, _ in ways}}
    found = fit(predict, np.concatenate(measured), bounds, tolerance=TOLERANCE)
    values = {"fixed_us": found["fixed_us"], **{f"{way}_gb_per_s": found[way] for way, _ in ways}}
    result.ship(evidence, "copy", values, predict(**found), np.concatenate(measured))
    result.plot("copies", "pinned", np.concatenate(sizes), predict(**found), np.concatenate(measured), "bytes")
    _fit_pageable(evidence, result, found, {way: points for (way, pinned), points in by_way.items() if not pinned})


def _fit_pageable(
    evidence: Evidence, result: OwnFit, pinned: dict[str, float], ways: dict[str, list[TimedPoint]]
) -> None:
    parts, sizes, measured = [], [], []
    for way, points in ways.items():
        parts.append(_sizes(points) / pinned[way])
        sizes.append(_sizes(points))
        measured.append(evidence.ns(points))
    if not parts:
        return
    at_full, ns = np.concatenate(parts), np.concatenate(measured)

    def predict(pageable_fraction: float) -> Floats:
        return np.asarray(pinned["fixed_us"] * 1e3 + at_full / pageable_fraction)

    found = fit(predict, ns, {"pageable_fraction": (0.3, 0.001, 2.0)}, tolerance=TOLERANCE)
    errors = dict(result.errors)
    result.ship(evidence, "copy", found, predict(**found), ns)
    result.errors = {**result.errors, "copy": errors["copy"], "copy.pageable": result.errors["copy"]}
    result.plot("copies", "pageable", np.concatenate(sizes), predict(**found), ns, "bytes")


def _sizes(points: Sequence[TimedPoint]) -> Floats:
    return np.array([point.work.bytes for point in points], float)


def take_readings(evidence: Evidence, result: OwnFit) -> None:
    """Figures that were read as they are, not fitted."""
    for point in evidence.read:
        if point.figure.startswith(READ):
            result.figures[point.figure] = as_figure(evidence, point)
            if point.figure == "overlap.slowdown":
                taken = Figure(float(point.details["taken"]), "assumed", "multiprocessors that a collective holds")
                result.figures["overlap.nccl_sms"] = taken


def as_figure(evidence: Evidence, point: FigurePoint) -> Figure:
    sigma = max(LEAST_SIGMA, round(min(point.relative_spread, 1.0), 3))
    return Figure(point.value, "measured", evidence.source, sigma=sigma)
