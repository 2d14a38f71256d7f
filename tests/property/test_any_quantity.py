import os
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from sim import units

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "200"))
PARSERS = [
    (units.parse_bytes, units.SIZE_UNITS),
    (units.parse_bandwidth, units.BANDWIDTH_UNITS),
    (units.parse_duration, units.TIME_UNITS),
    (units.parse_compute, units.COMPUTE_UNITS),
]


@settings(max_examples=EXAMPLES)
@given(data=st.data(), whole=st.integers(0, 4000), thousandths=st.integers(0, 999), space=st.sampled_from(["", " "]))
def test_a_quantity_is_its_number_times_its_unit(data, whole, thousandths, space):
    parse, known = data.draw(st.sampled_from(PARSERS))
    unit = data.draw(st.sampled_from(sorted(known)))
    exact = (Fraction(whole) + Fraction(thousandths, 1000)) * Fraction(known[unit])
    assert parse(f"{whole}.{thousandths:03d}{space}{unit}") == round(exact)


@settings(max_examples=EXAMPLES)
@given(text=st.text() | st.from_regex(units.QUANTITY, fullmatch=True))
def test_any_text_is_a_whole_quantity_or_a_unit_error(text):
    for parse, _ in PARSERS:
        try:
            assert parse(text) >= 0
        except units.UnitError as error:
            assert "e.g." in str(error)


@settings(max_examples=EXAMPLES)
@given(count=st.integers(0, 2**53))
def test_what_people_read_is_within_half_a_percent_and_reads_back(count):
    for show, parse in [
        (units.format_bytes, units.parse_bytes),
        (units.format_duration, units.parse_duration),
        (units.format_bandwidth, units.parse_bandwidth),
        (units.format_compute, units.parse_compute),
    ]:
        back = parse(show(count).replace(",", ""))
        assert abs(back - count) * 200 <= count
