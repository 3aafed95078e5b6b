"""The shipped config files construct the released models."""

from __future__ import annotations

import json
from typing import Any

import diffusers
import pytest
import torch
import transformers

from gfgen.models.geometry.model import CONFIGS, SHIPPED

RELEASED_BILLIONS = {
    "wan2.2-ti2v-5b": {"transformer": 5.00, "text_encoder": 5.68},
    "wan2.2-t2v-a14b": {"transformer": 14.29, "transformer_2": 14.29, "text_encoder": 5.68},
    "wan2.2-i2v-a14b": {"transformer": 14.29, "transformer_2": 14.29, "text_encoder": 5.68},
    "qwen-image": {"transformer": 20.43, "text_encoder": 8.29},
}
"""Billions of parameters, counted in the released weight files."""


@pytest.mark.parametrize("name", SHIPPED)
def test_configs_construct_models_of_the_released_size(name: str) -> None:
    declared = json.loads((CONFIGS / name / "gfgen.json").read_text())["num_parameters"]
    index = json.loads((CONFIGS / name / "model_index.json").read_text())
    for component, number in declared.items():
        library, class_name = index[component]
        assert _num_parameters(library, class_name, CONFIGS / name / component) == number
    for component, billions in RELEASED_BILLIONS[name].items():
        assert round(declared[component] / 1e9, 2) == billions


@pytest.mark.parametrize("name", SHIPPED)
def test_schedulers_take_every_value_of_their_config(name: str) -> None:
    config = json.loads((CONFIGS / name / "scheduler" / "scheduler_config.json").read_text())
    scheduler = getattr(diffusers, config.pop("_class_name"))(**config)
    assert {key: scheduler.config[key] for key in config} == config


def _num_parameters(library: str, class_name: str, folder: Any) -> int:
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        if library == "diffusers":
            model = getattr(diffusers, class_name).from_config(config)
        else:
            model_class = getattr(transformers, class_name)
            model = model_class(model_class.config_class.from_dict(config))
    return sum(parameter.numel() for parameter in set(model.parameters()))
