"""The multiples of sizes, from diffusers' source and configs."""

import importlib.util

import pytest
from builders import geometry_of

from gfgen.errors import JobError
from gfgen.job.spec import JobSpec


@pytest.mark.parametrize(
    ("name", "transformer", "multiple"),
    [
        ("FluxPipeline", {"patch_size": 1}, 16),  # self.vae_scale_factor * 2, in a warning
        ("LTXPipeline", {"patch_size": 1}, 32),
        ("StableDiffusion3Pipeline", {"patch_size": 2}, 16),  # self.vae_scale_factor * self.patch_size
        ("HunyuanVideoPipeline", {"patch_size": 2}, 16),
        ("ZImagePipeline", {"all_patch_size": [2]}, 16),  # a variable of __call__
        ("WanVACEPipeline", {"patch_size": [1, 2, 2]}, 16),  # through transformer or transformer_2
        ("Krea2Pipeline", {"patch_size": 2}, 16),
        ("CogVideoXPipeline", {"patch_size": 2}, 16),  # checks 8, and has patches of 2 x 8
        ("MochiPipeline", {"patch_size": 2}, 16),  # checks 8, with a factor of another name
        ("SanaPipeline", {"patch_size": 1}, 32),
        ("HunyuanVideo15Pipeline", {"patch_size": 2}, 2),  # no check, and no factor in this config
    ],
)
def test_multiple_is_what_the_class_checks_and_its_patches_need(name, transformer, multiple):
    assert geometry_of(name, transformer=transformer).multiple == multiple


def test_a_model_with_a_unet_has_the_multiple_of_its_check():
    assert geometry_of("StableDiffusionXLPipeline", unet={}).multiple == 8


@pytest.mark.parametrize(
    ("asked", "made"), [((1280, 720), (1280, 704)), ((854, 480), (832, 480)), ((64, 96), (64, 96))]
)
def test_sizes_are_rounded_down(asked, made):
    geometry = geometry_of("LTXPipeline", transformer={"patch_size": 1})
    run = geometry.resolve(JobSpec(id="a", prompt="x", width=asked[0], height=asked[1]))
    assert (run.width, run.height) == made
    assert geometry.resolve(run) == run


def test_a_size_below_the_multiple_is_a_problem():
    geometry = geometry_of("LTXPipeline", transformer={"patch_size": 1})
    with pytest.raises(JobError, match=r"from 32x32 to .* rounded down to multiples of 32x32"):
        geometry.resolve(JobSpec(id="a", prompt="x", width=31, height=64))


def test_packages_that_a_scheduler_needs_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", _without("torchsde", "scipy"))
    geometry = geometry_of("FluxPipeline", transformer={}, scheduler={})
    for options, text in (
        ({"class": "DPMSolverSDEScheduler"}, "needs the package torchsde; pip install torchsde"),
        ({"class": "LMSDiscreteScheduler"}, "needs the package scipy"),
        ({"class": "EulerDiscreteScheduler", "use_beta_sigmas": True}, "needs the package scipy"),
    ):
        with pytest.raises(JobError, match=text):
            geometry.resolve(JobSpec(id="a", prompt="x", scheduler=options))


def _without(*packages):
    real = importlib.util.find_spec
    return lambda name, *rest: None if name in packages else real(name, *rest)
