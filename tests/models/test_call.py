"""What the call of a diffusers pipeline takes, read from its source."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.geometry import call
from gfgen.models.geometry.call import signature_of


def problems(pipeline_class: str, **fields: Any) -> list[str]:
    spec = JobSpec(id="fox", prompt="a fox", **fields)
    return [str(found) for found in signature_of(pipeline_class).problems(spec)]


def test_nothing_of_diffusers_or_torch_is_imported() -> None:
    code = (
        "import sys; from gfgen.models.geometry.call import signature_of; signature_of('FluxPipeline'); "
        "assert not {'torch', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_class_that_diffusers_lacks_is_named() -> None:
    with pytest.raises(ModelError, match=r"pipeline class 'Flux9Pipeline' is not in diffusers 0\."):
        signature_of("Flux9Pipeline")


def test_a_call_of_a_base_class_counts() -> None:
    assert "image" in signature_of("StableDiffusionXLControlNetPipeline").arguments


class TestArgs:
    def test_plain_values_of_the_annotated_types_pass(self) -> None:
        args = {"prompt_2": "an owl", "max_sequence_length": 256, "num_images_per_prompt": 2}
        assert problems("FluxPipeline", args=args) == []
        assert problems("FluxPipeline", args={"prompt_2": ["an owl"], "max_sequence_length": 256.0}) == []
        assert (
            problems("StableDiffusion3Pipeline", args={"skip_guidance_layers": [7, 8], "clip_skip": None})
            == []
        )

    @pytest.mark.parametrize(
        ("args", "accepted"),
        [
            ({"max_sequence_length": "256"}, 'max_sequence_length = "256": a whole number or null'),
            ({"max_sequence_length": 2.5}, "max_sequence_length = 2.5: a whole number or null"),
            ({"max_sequence_length": True}, "max_sequence_length = true: a whole number or null"),
            ({"prompt_2": 5}, "prompt_2 = 5: a text or a list of texts or null"),
            ({"prompt_2": ["a", 5]}, 'prompt_2 = ["a", 5]: a text or a list of texts or null'),
        ],
    )
    def test_other_types_are_refused(self, args: dict[str, Any], accepted: str) -> None:
        assert problems("FluxPipeline", args=args) == [f"args.{accepted} is accepted"]

    def test_null_passes_where_the_call_compares_with_it(self) -> None:
        """With more than two steps SANA-Sprint takes nothing else."""
        assert problems("SanaSprintPipeline", args={"intermediate_timesteps": None}) == []
        assert problems("SanaSprintPipeline", args={"clean_caption": None}) != []

    def test_no_pictures_are_refused(self) -> None:
        (found,) = problems("FluxPipeline", args={"num_images_per_prompt": 0})
        assert found == "args.num_images_per_prompt = 0: at least 1 is accepted"

    def test_an_unknown_argument_gets_the_nearest_name(self) -> None:
        (found,) = problems("FluxPipeline", args={"max_sequence_lenght": 5})
        assert found.endswith("is no such argument of FluxPipeline; did you mean max_sequence_length?")

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("prompt", "use prompt"),
            ("height", "use size"),
            ("num_inference_steps", "use steps"),
            ("guidance_scale", "use guidance_scale"),
            ("generator", "use seed"),
            ("latents", "use seed"),
            ("sigmas", "use sigmas"),
            ("output_type", "gfgen writes pictures, videos and sound"),
        ],
    )
    def test_what_gfgen_sets_is_refused_with_the_field_to_use(self, name: str, field: str) -> None:
        assert problems("FluxPipeline", args={name: 1}) == [f"args.{name} = 1: is set by gfgen; {field}"]

    @pytest.mark.parametrize("name", ["prompt_embeds", "callback_on_step_end", "joint_attention_kwargs"])
    def test_what_no_file_can_hold_is_refused(self, name: str) -> None:
        (found,) = problems("FluxPipeline", args={name: 1})
        assert found.endswith("takes what a job file cannot hold; leave it out")

    def test_a_picture_belongs_to_files(self) -> None:
        found = problems("FluxFillPipeline", args={"mask_image": "a.png"})
        assert found == [
            'args.mask_image = "a.png": is a picture or video; give its path in files: {"mask_image": "..."}'
        ]


class TestFiles:
    def test_pictures_and_videos_pass(self) -> None:
        files = {"video": "a.mp4", "mask": "b.mp4", "reference_images": ["c.png"]}
        assert problems("WanVACEPipeline", files=files) == []

    def test_others_are_refused_with_the_names_that_there_are(self) -> None:
        (found,) = problems("WanVACEPipeline", files={"reference_image": "a.png"})
        assert found.endswith("is no such argument of WanVACEPipeline; did you mean reference_images?")
        (found,) = problems("WanVACEPipeline", files={"max_sequence_length": "a.png"})
        assert found.endswith("takes no pictures; its files are video, mask, reference_images")

    @pytest.mark.parametrize(
        ("pipeline_class", "fields"),
        [
            ("CogVideoXImageToVideoPipeline", ["image"]),
            ("FluxImg2ImgPipeline", ["image"]),
            ("FluxControlPipeline", ["files.control_image"]),
            ("StableDiffusion3InpaintPipeline", ["image", "files.mask_image"]),
            ("WanAnimatePipeline", ["image", "files.pose_video", "files.face_video"]),
            ("QwenImageEditInpaintPipeline", ["files.mask_image"]),
            ("LTXConditionPipeline", []),
            ("WanVACEPipeline", []),
        ],
    )
    def test_a_missing_picture_is_one_problem(self, pipeline_class: str, fields: list[str]) -> None:
        spec = JobSpec(id="fox", prompt="a fox")
        found = list(signature_of(pipeline_class).problems(spec))
        assert [each.field for each in found] == fields
        assert all(each.accepted.endswith("needs a picture or video") for each in found)

    def test_a_union_of_controlnets_needs_its_modes(self) -> None:
        name = "StableDiffusionXLControlNetUnionPipeline"
        files = {"control_image": ["a.png"]}
        assert problems(name, files=files) == [f"args.control_mode: missing; {name} needs it"]
        assert problems(name, files=files, args={"control_mode": [0]}) == []
        assert problems("FluxControlNetPipeline", files=files) == []

    def test_pictures_of_adapters_that_gfgen_does_not_load_are_refused(self) -> None:
        (found,) = problems("FluxPipeline", files={"ip_adapter_image": "a.png"})
        assert found == "files.ip_adapter_image: IP-Adapters are not loaded; leave it out"

    def test_image_gives_the_argument_of_that_name(self) -> None:
        assert problems("FluxImg2ImgPipeline", image="a.png") == []
        assert problems("FluxImg2ImgPipeline", files={"image": "a.png"}) == []
        (found,) = problems("FluxControlPipeline", image="a.png", files={"control_image": "b.png"})
        assert found.endswith("FluxControlPipeline takes no image; its files are control_image")

    @pytest.mark.parametrize(
        ("fields", "sibling"),
        [
            ({"image": "a.png"}, "StableDiffusionXLImg2ImgPipeline"),
            ({"args": {"strength": 0.5}}, "StableDiffusionXLImg2ImgPipeline"),
            ({"files": {"mask_image": "a.png"}}, "StableDiffusionXLInpaintPipeline"),
        ],
    )
    def test_a_class_for_the_same_weights_that_takes_it_is_named(
        self, fields: dict[str, Any], sibling: str
    ) -> None:
        (found,) = problems("StableDiffusionXLPipeline", **fields)
        assert found.endswith(
            f'{sibling} takes it: make that the "_class_name" in the model_index.json of a copy'
        )


class TestFields:
    def test_a_field_without_an_argument_is_refused(self) -> None:
        (found,) = problems("FluxPipeline", guidance_scale_2=3.0)
        assert found == "guidance_scale_2 = 3: FluxPipeline takes no guidance_scale_2; leave it out"
        assert problems("FluxPipeline", frames=9) != []
        assert problems("FluxPipeline", flow_shift=2.0) != []
        assert problems("FluxPipeline", boundary_ratio=0.5) != []

    def test_fields_become_arguments(self) -> None:
        spec = JobSpec(
            id="fox", prompt="a fox", width=64, height=32, frames=9, fps=8, steps=4, guidance_scale=3.0
        )
        assert signature_of("LTXPipeline").arguments_for(spec) == {
            "prompt": "a fox",
            "width": 64,
            "height": 32,
            "num_frames": 9,
            "num_inference_steps": 4,
            "guidance_scale": 3.0,
            "frame_rate": 8,
        }
        assert "frame_rate" not in signature_of("CogVideoXPipeline").arguments_for(spec)

    def test_equal_numbers_become_equal_arguments(self) -> None:
        signature = signature_of("FluxImg2ImgPipeline")
        spec = JobSpec(id="fox", prompt="a fox", args={"strength": 1, "max_sequence_length": 64.0})
        found = signature.arguments_for(spec)
        assert (found["strength"], found["max_sequence_length"]) == (1.0, 64)
        assert isinstance(found["strength"], float)
        assert isinstance(found["max_sequence_length"], int)

    def test_lists_become_the_tuples_that_calls_add_up(self) -> None:
        spec = JobSpec(id="fox", prompt="a fox", args={"original_size": [512, 768], "prompt_2": ["a"]})
        found = signature_of("StableDiffusionXLPipeline").arguments_for(spec)
        assert (found["original_size"], found["prompt_2"]) == ((512, 768), ["a"])

    def test_a_size_is_made_where_the_call_has_an_area_of_its_own(self) -> None:
        spec = JobSpec(id="fox", prompt="a fox", width=128, height=64)
        assert signature_of("FluxKontextPipeline").arguments_for(spec)["max_area"] == 128 * 64
        asked = replace(spec, args={"max_area": 4096})
        assert signature_of("FluxKontextPipeline").arguments_for(asked)["max_area"] == 4096


class TestScheduler:
    def problems(self, **fields: Any) -> list[str]:
        spec = replace(JobSpec(id="fox", prompt="a fox"), **fields)
        own = "FlowMatchEulerDiscreteScheduler"
        return [str(found) for found in signature_of("FluxPipeline").problems(spec, scheduler_class=own)]

    def test_classes_and_options_of_diffusers_pass(self) -> None:
        assert self.problems(scheduler={"class": "UniPCMultistepScheduler", "flow_shift": 3}) == []
        assert self.problems(scheduler={"shift": 3, "use_dynamic_shifting": False}) == []
        assert self.problems(sigmas=[1.0, 0.5], steps=2) == []

    def test_an_unknown_class_gets_the_nearest_name(self) -> None:
        (found,) = self.problems(scheduler={"class": "UniPCScheduler"})
        assert found.startswith("scheduler.class = UniPCScheduler: is no scheduler of diffusers 0.")
        assert "did you mean" in found

    def test_an_argument_that_is_a_field_names_the_field(self) -> None:
        (found,) = self.problems(args={"cfg": 3})
        assert str(found).endswith("did you mean the field guidance_scale?")

    def test_an_unknown_option_gets_the_nearest_name(self) -> None:
        (found,) = self.problems(scheduler={"shfit": 3})
        assert found.endswith("is no option of FlowMatchEulerDiscreteScheduler; did you mean shift?")

    def test_an_option_of_a_wrong_type_is_refused(self) -> None:
        assert self.problems(scheduler={"shift": "3"}) == ['scheduler.shift = "3": a number is accepted']

    @pytest.mark.parametrize("sigmas", [[2.0, 0.5], [1.0, 0.5, 0.0]])
    def test_sigmas_that_the_scheduler_would_not_use_as_written_are_refused(self, sigmas: Any) -> None:
        (found,) = self.problems(sigmas=sigmas)
        assert found.endswith(
            "numbers up to 1 are accepted, without the 0 at the end, which the scheduler adds"
        )

    def test_sigmas_stand_beside_no_schedule_of_the_scheduler(self) -> None:
        (found,) = self.problems(scheduler={"use_karras_sigmas": True}, sigmas=[1.0, 0.5])
        assert found.endswith(
            "use_karras_sigmas of the scheduler spaces the noise levels itself; leave one out"
        )

    def test_sigmas_need_a_scheduler_that_takes_them(self) -> None:
        (found,) = self.problems(scheduler={"class": "DDIMScheduler"}, sigmas=[1.0, 0.5])
        assert found == "sigmas: DDIMScheduler takes no sigmas; name another scheduler or leave them out"
        assert problems("CogVideoXPipeline", sigmas=[1.0])[0].startswith(
            "sigmas = [1.0]: CogVideoXPipeline takes no"
        )


def test_annotations_are_read_once_for_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = signature_of("LTXImageToVideoPipeline")
    spec = JobSpec(id="a", prompt="a fox", args={"max_sequence_length": 8})
    first = list(signature.problems(spec))
    monkeypatch.setattr(call.ast, "unparse", None)
    assert list(signature.problems(spec)) == first
