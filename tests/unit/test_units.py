import pytest

from sim.units import (
    UnitError,
    format_bandwidth,
    format_bytes,
    format_compute,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_compute,
    parse_duration,
)


def test_gib_is_binary_and_gb_decimal():
    assert parse_bytes("80 GiB") == 80 * 2**30
    assert parse_bytes("80 GB") == 80 * 10**9
    assert parse_bytes("1.5MiB") == 3 * 2**19


def test_a_small_b_is_a_bit_and_a_large_b_a_byte():
    assert parse_bandwidth("400 Gb/s") == 50 * 10**9
    assert parse_bandwidth("400 GB/s") == 400 * 10**9
    assert parse_bandwidth("3.35 TB/s") == 3_350_000_000_000
    assert parse_bytes("8 b") == 1


def test_durations_are_nanoseconds():
    assert parse_duration("12 us") == 12_000
    assert parse_duration("12 µs") == 12_000
    assert parse_duration("1.5 ms") == 1_500_000
    assert parse_duration("0 s") == 0


def test_rates_of_computation():
    assert parse_compute("989 TFLOP/s") == 989 * 10**12
    assert parse_compute("989.4 TFLOP/s") == 989_400_000_000_000
    assert parse_compute("1e3 GFLOP/s") == 10**12


@pytest.mark.parametrize("value", [80, 80.0, "80", " 80 ", True, None, "", "GiB", "-1 GiB", "8k", "1 2 GiB", [1]])
def test_a_size_without_number_or_unit_is_an_error(value):
    with pytest.raises(UnitError, match=r"a size with a unit is expected, e\.g\. 80 GiB"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "80 gib"),
        (parse_bytes, "80 GiB/s"),
        (parse_bandwidth, "400 Gb"),
        (parse_bandwidth, "400 Gbps"),
        (parse_duration, "12 min"),
        (parse_compute, "989 TFLOPS"),
        (parse_compute, "989 tflop/s"),
    ],
)
def test_a_foreign_unit_is_named_with_the_units_allowed(parse, text):
    with pytest.raises(UnitError, match=f"unit {text.split()[1]} is not one of "):
        parse(text)


def test_a_number_beyond_any_machine_is_an_error():
    with pytest.raises(UnitError):
        parse_bytes("1" * 80 + " GiB")


def test_people_read_three_digits_in_the_largest_fitting_unit():
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1,023 B"
    assert format_bytes(16 * 2**20) == "16.0 MiB"
    assert format_bytes(parse_bytes("79.11 GiB")) == "79.1 GiB"
    assert format_bytes(2**30 - 1) == "1.00 GiB"
    assert format_bytes(2**43) == "8,192 GiB"
    assert format_bytes(-(2**30)) == "-1.00 GiB"
    assert format_duration(0) == "0 ns"
    assert format_duration(12_300) == "12.3 us"
    assert format_duration(999_960) == "1.00 ms"
    assert format_duration(5_000_000_000) == "5.00 s"
    assert format_bandwidth(3_350_000_000_000) == "3.35 TB/s"
    assert format_bandwidth(50 * 10**9) == "50.0 GB/s"
    assert format_compute(989_400_000_000_000) == "989 TFLOP/s"
