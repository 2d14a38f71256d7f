"""Play a world: one SimPy process per host and per stream, one for the links."""

from __future__ import annotations

from array import array

from simpy import Environment

from sim.engine.deadlock import DeadlockError, Standstill, wait_cycle
from sim.engine.gpu import Gpu
from sim.engine.host import Host
from sim.engine.links import Fabric
from sim.engine.rendezvous import Rendezvous
from sim.engine.stream import Stream
from sim.program.collector import without_collector
from sim.program.world import World
from sim.timeline.records import Played, RankPlayed, RateChange


def play(world: World, *, record_rates: bool = False) -> Played:
    """When everything of a validated world happens. `record_rates` keeps the rate of every flow as it changes.

    Raises `DeadlockError` when somebody waits for ever.
    """
    env = Environment()
    rates: list[RateChange] = []
    fabric = Fabric(env, world.capacity_bytes_per_ns, rates if record_rates else None)
    gpus = [Gpu(fabric, world.levels) for _ in world.ranks]
    rendezvous = Rendezvous(env, world, fabric, gpus)
    streams = [
        [Stream(env, world, rendezvous, gpu) for _ in range(program.streams)] for program, gpu in zip(world.ranks, gpus)
    ]
    hosts = [Host(env, world, program, own, rendezvous) for program, own in zip(world.ranks, streams)]
    for host, own in zip(hosts, streams):
        env.process(host.run())
        for stream in own:
            env.process(stream.run())
    env.process(fabric.run())
    with without_collector():
        env.run()

    standstill = Standstill(
        host_row=[host.at_row for host in hosts],
        stream_row=[[stream.at_row for stream in own] for own in streams],
        pending=[[stream.pending for stream in own] for own in streams],
    )
    if standstill.first_stuck() is not None:
        raise DeadlockError(wait_cycle(world, standstill))
    return Played(
        ranks=[_played(host, own) for host, own in zip(hosts, streams)],
        fired_ns=rendezvous.fired_ns,
        met_ns=rendezvous.met_ns,
        parted_ns=rendezvous.parted_ns,
        rates=rates,
    )


def _played(host: Host, streams: list[Stream]) -> RankPlayed:
    return RankPlayed(
        rows=array("d", b"".join([host.rows.tobytes(), *(stream.rows.tobytes() for stream in streams)])),
        pieces=[piece for stream in streams for piece in stream.pieces],
        parts=[part for stream in streams for part in stream.parts],
        host_end_ns=host.end_ns,
        device_end_ns=max((stream.end_ns for stream in streams), default=0.0),
    )
