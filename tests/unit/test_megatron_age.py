"""What Megatron did in the year of a published row."""

from __future__ import annotations

import pytest

from tests.unit.test_rows import document

PIPED = {"tp": "2", "pp": "2", "vpp": "2", "dp": "2", "num_gpus": "8", "global_batch": "16", "fsdp_or_zero": "none"}
PIPED |= {"mlp_type": "gelu", "recompute": "full", "layers": "32", "hidden": "4096", "micro_batch": "1", "sp": "no"}


@pytest.mark.parametrize(
    ("source", "changes", "persistent", "beside", "overlaps", "shares"),
    [
        ("Megatron-LM", {}, None, None, None, None),
        ("Korthikanti et al. 2022", {}, None, None, False, True),
        ("Korthikanti et al. 2022", {"hidden": "4352", "heads": "32"}, False, None, False, True),
        ("Korthikanti et al. 2022", {"sp": "yes"}, None, None, False, None),
        ("Narayanan et al. 2021 PTD-P", {}, False, False, False, True),
        ("BigScience (Megatron-DeepSpeed)", {"vpp": ""}, False, False, None, True),
    ],
)
def test_megatron_of_its_year(
    source: str, changes: dict[str, str], persistent: bool | None, beside: bool | None, overlaps: bool | None,
    shares: bool | None,
) -> None:  # fmt: skip
    found = document(**PIPED | {"source": source} | changes)
    parallel = found["parallel"]
    assert found["model"].get("persistent_norm") is persistent
    assert parallel["tensor"].get("async_all_reduce") is beside
    assert parallel["data"].get("gradient_accumulation_fusion") is beside
    assert (parallel["pipeline"].get("overlap_p2p"), parallel["pipeline"].get("scatter_gather")) == (overlaps, shares)


def test_gradients_of_2021_are_summed_in_16_bit() -> None:
    assert (
        document(**PIPED | {"source": "Narayanan et al. 2021 PTD-P", "precision": "fp16"})["precision"]["reduce"]
        == "fp16"
    )
    assert document(**PIPED | {"source": "Megatron-LM", "precision": "fp16"})["precision"]["reduce"] == "fp32"


def test_a_named_machine_has_its_network() -> None:
    row = PIPED | {"source": "BigScience (Megatron-DeepSpeed)", "vpp": ""}
    assert document(**row | {"gpu": "A100-SXM4-80GB (Jean Zay, 8/node)"})["cluster"]["network"] == "50 Gb/s"
    assert "network" not in document(**row | {"gpu": "A100-SXM4-80GB (Selene)"})["cluster"]
