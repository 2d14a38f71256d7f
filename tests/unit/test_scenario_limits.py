"""What cannot be, may not be so large, or is not known: problems and warnings of valid sections that do not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.cost.host import framework_names
from sim.cost.profile import profile_names
from sim.scenario import ScenarioError, load_scenario, load_text
from sim.scenario.names import FRAMEWORKS, PROFILES
from sim.scenario.schema import ScenarioFile
from sim.scenario.sections import model_in
from tests.unit.test_scenario_problems import VALID, problems

UNITS = "parallel.fsdp.units=torchtitan_2026"
ROOT_RESHARD = "parallel.fsdp.root_reshard_after_forward"


def told(overrides: list[str]) -> list[str]:
    return [f"{path} {text}" for _, path, text in problems(VALID, overrides)]


def warned(overrides: list[str]) -> list[str]:
    return [text.removeprefix("--set: ") for text in load_text(VALID, overrides=overrides).warnings]


def test_torchtitans_units_need_torchtitans_modules_and_a_head_of_its_own() -> None:
    assert load_text(VALID, overrides=[UNITS]).warnings == ()
    (tied,) = told([UNITS, "model.tied_embeddings=true"])
    assert "torchtitan_2026: wraps embedding and head apart, but model.tied_embeddings makes them one" in tied
    (other,) = told([UNITS, "model.implementation=transformers"])
    assert other == (
        "parallel.fsdp.units torchtitan_2026: is a layout of torchtitan's Llama: transformers has no such modules;"
        " use blocks"
    )
    (gpt,) = told([UNITS, "model={preset: gpt-tiny, implementation: null}"])
    assert "nanogpt has no such modules" in gpt


@pytest.mark.parametrize("value", ["true", "false", "2"])
def test_torchtitans_root_holds_nothing_to_reshard(value: str) -> None:
    (text,) = told([UNITS, f"{ROOT_RESHARD}={value}"])
    assert text.endswith("with units: torchtitan_2026 the root holds no parameters of its own")


def test_resharding_the_root_is_ignored_before_2_8() -> None:
    reshard = f"{ROOT_RESHARD}=true"
    assert warned([reshard, 'torch="2.7"']) == [
        f"{ROOT_RESHARD} true: is ignored by PyTorch 2.7: an effect is seen from 2.8 on"
    ]
    assert warned([reshard, 'torch="2.8"']) == warned([f"{ROOT_RESHARD}=false", 'torch="2.7"']) == []


@pytest.mark.parametrize(
    ("version", "nearest"), [("1.0", "2.4"), ("2.3.1", "2.4"), ("2.15", "2.14"), ("99.99", "2.14")]
)
def test_an_unknown_torch_is_played_by_the_nearest_rules_and_told(version: str, nearest: str) -> None:
    assert warned([f'torch="{version}"']) == [
        f"torch {version}: is not known: the rules of {nearest}, the nearest, are used"
    ]


@pytest.mark.parametrize("version", ["2.4", "2.9", "2.10", "2.14", "2.14.1"])
def test_a_known_torch_is_taken_quietly(version: str) -> None:
    assert warned([f'torch="{version}"']) == []


@pytest.mark.parametrize("override", ["cluster.network=0 Gb/s", "cluster.usable_memory=0 GiB"])
def test_nothing_is_no_capacity(override: str) -> None:
    (text,) = told([override])
    assert text.endswith(": more than nothing is expected")


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["batch.seq_len=999999999", "model.attention=math"], "batch"),
        (["batch.seq_len=999999999", "model.preset=llama-3.1-8b"], "batch"),
        (["batch.micro_batch=1000000000"], "batch"),
        (["model.hidden=1000000000", "model.heads=8"], "model"),
        (["model.vocab=1000000000", "model.hidden=8388608", "model.heads=8"], "model"),
    ],
)
def test_absurd_sizes_are_told_before_numbers_overflow(overrides: list[str], place: str) -> None:
    assert any(text.startswith(f"{place} needs about ") for text in told(overrides))


def test_the_largest_sizes_that_people_ask_for_are_taken() -> None:
    load_text(VALID, overrides=["batch.seq_len=1048576", "model.preset=llama-3.1-405b"])


def test_too_many_micro_batches_are_told() -> None:
    assert told(["batch.accumulation=1000000"]) == [
        "batch.accumulation 1000000: a number of micro-batches of at most 10,000 is expected"
    ]


def test_names_of_later_rooms_are_those_that_they_know() -> None:
    assert list(PROFILES) == profile_names()
    assert list(FRAMEWORKS) == framework_names()


def test_wrong_names_are_among_all_problems() -> None:
    text = VALID.replace("512", "8k") + "profile: h100-sxn\nhost: {framework: egaer}\n"
    found = problems(text)
    assert [(line, path) for line, path, _ in found] == [(3, "batch.seq_len"), (8, "profile"), (9, "host.framework")]
    assert found[1][2].endswith("(did you mean h100-sxm?)")
    assert found[2][2].endswith("(did you mean eager?)")
    assert load_text(VALID + "profile: assumed:h100-sxm-80gb\n").strategies[0].profile == "assumed:h100-sxm-80gb"


@pytest.mark.parametrize("number", ["1e3", "1000.0", "1_000", "0x3e8"])
def test_whole_numbers_may_be_written_as_yaml_allows(number: str) -> None:
    try:
        (setup, *_) = load_text(VALID.replace("512", number)).strategies
    except ScenarioError as error:
        assert "in quotes it is text" not in str(error) or number == "1_000"
    else:
        assert setup.batch.seq_len == 1000


def test_warnings_of_a_config_json_stand_where_it_is_named(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096, "sliding_window": 256,
        "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.yaml").write_text(VALID.replace("preset: llama-tiny", "config: config.json"))
    (text,) = load_scenario(tmp_path / "mine.yaml").warnings
    place = f"{tmp_path / 'mine.yaml'} line 1: model.config config.json: "
    assert text == place + "sliding_window 256: attention is modelled over all 512 tokens"
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 100_000}))
    with pytest.raises(ScenarioError, match=r"line 1  model\.layers  100000: at most 10,000 is expected"):
        load_scenario(tmp_path / "mine.yaml")


def fields(section: Any, path: str = "") -> list[str]:
    """Dotted paths of all fields below a section that are no sections themselves."""
    found = []
    for name, field in section.model_fields.items():
        inner = model_in(field.annotation)
        if inner is not None and name not in ("layers", "strategies"):
            found += fields(inner, f"{path}{name}.")
        elif name not in ("extends", "strategies"):
            found.append(f"{path}{name}")
    return found


@pytest.mark.parametrize("value", ["{a: 1}", "[[1]]", "7.5", "true", '"7"', "2020-01-01"])
@pytest.mark.parametrize("path", fields(ScenarioFile))
def test_no_message_is_pydantics_own(path: str, value: str) -> None:
    try:
        load_text(VALID, overrides=[f"{path}={value}"])
    except ScenarioError as error:
        assert "Input should be" not in str(error), str(error)
        assert "Value error" not in str(error), str(error)
