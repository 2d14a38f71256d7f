"""Max-min fair shares, by hand. Rates in bytes/ns."""

from __future__ import annotations

from math import inf

from sim.engine.links import share


def test_flows_of_one_link_share_it_equally() -> None:
    assert share([inf, inf, inf], [(0,), (0,), (0,)], [3.0]) == [1, 1, 1]


def test_what_a_capped_flow_leaves_goes_to_the_others() -> None:
    assert share([0.5, inf, inf], [(0,), (0,), (0,)], [3.0]) == [0.5, 1.25, 1.25]


def test_a_flow_of_weight_two_gets_two_shares_until_its_cap() -> None:
    assert share([inf, inf], [(0,), (0,)], [3.0], [2, 1]) == [2, 1]
    assert share([1.5, inf], [(0,), (0,)], [3.0], [2, 1]) == [1.5, 1.5]


def test_what_a_flow_cannot_use_for_another_link_goes_to_the_others() -> None:
    assert share([inf, inf], [(0, 1), (0,)], [3.0, 1.0]) == [1, 2]


def test_a_flow_without_links_reaches_its_cap() -> None:
    assert share([7.0, inf], [(), (0,)], [3.0]) == [7, 3]


def test_three_links_fill_one_after_the_other() -> None:
    assert share([inf] * 4, [(0,), (0, 1), (1, 2), (2,)], [2.0, 4.0, 10.0]) == [1, 1, 3, 7]


def test_no_flow_no_rate() -> None:
    assert share([], [], [1.0]) == []
