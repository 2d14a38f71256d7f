"""Pipeline schedules: pure functions from (ranks, micro-batches, chunks per rank) to each rank's list of actions."""

from sim.runtime.schedules.actions import Action, Kind, Part, in_flight, parts_of, rank_of, stages_of
from sim.runtime.schedules.names import SCHEDULES, order, orders
from sim.runtime.schedules.transfers import Step, with_transfers

__all__ = [
    "SCHEDULES", "Action", "Kind", "Part", "Step", "in_flight", "order", "orders", "parts_of", "rank_of", "stages_of",
    "with_transfers",
]  # fmt: skip
