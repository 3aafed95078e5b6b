"""What in a job has no effect is a warning."""

import pytest
from builders import geometry_of
from movies import write_videos
from PIL import Image

from gfgen.errors import Warned
from gfgen.job.images import RATE
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.rules import OF_FLOW
from gfgen.runtime.core import admission
from gfgen.runtime.core.admission import ResolvedModel, admit
from gfgen.session.admission import find_weightless

MODELS = {
    "flux-dev": geometry_of("FluxPipeline", transformer={"guidance_embeds": True}),
    "flux-schnell": geometry_of("FluxPipeline", transformer={"guidance_embeds": False}),
    "klein": geometry_of("Flux2KleinPipeline", transformer={}, index={"is_distilled": True}),
    "sd3": geometry_of("StableDiffusion3Pipeline", transformer={"patch_size": 2}),
    "sd": geometry_of("StableDiffusionPipeline", unet={}, index={"text_encoder": ["t", "CLIPTextModel"]}),
    "img2img": geometry_of("FluxImg2ImgPipeline", transformer={"guidance_embeds": True}),
}


def find(name):
    if name not in MODELS:
        return find_weightless(name)
    return ResolvedModel(name, MODELS[name].signature.pipeline_class, MODELS[name])


def warnings_of(**fields):
    spec = JobSpec(**{"id": "a", "prompt": "a fox", **fields})
    jobs, problems = admit([spec], default_model="shapes", find_model=find)
    assert not problems
    return [warned.kind for warned in jobs[0].info.warnings]


WITHOUT_GUIDANCE = "negative_prompt has no effect without guidance"


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"model": "shapes", "negative_prompt": "blurry", "guidance_scale": 1.0}, WITHOUT_GUIDANCE),
        ({"model": "shapes", "negative_prompt": "blurry", "guidance_scale": 2.0}, None),
        ({"model": "tiny-qwen-image", "negative_prompt": "blurry", "true_cfg_scale": 1.0}, WITHOUT_GUIDANCE),
        ({"model": "flux-dev", "negative_prompt": "blurry"}, WITHOUT_GUIDANCE),
        ({"model": "flux-dev", "negative_prompt": "blurry", "true_cfg_scale": 2.0}, None),
        ({"model": "sd3", "negative_prompt": "blurry"}, None),
        ({"model": "sd3", "negative_prompt": "blurry", "guidance_scale": 1.0}, WITHOUT_GUIDANCE),
        ({"model": "sd3", "negative_prompt": " ", "guidance_scale": 1.0}, None),
        (
            {"model": "klein", "guidance_scale": 4.0},
            "guidance_scale has no effect on klein: the model is dis",
        ),
        (
            {"model": "flux-schnell", "guidance_scale": 4.0},
            "guidance_scale has no effect on flux-schnell: its",
        ),
        ({"model": "flux-dev", "guidance_scale": 4.0}, None),
        ({"model": "flux-dev", "true_cfg_scale": 4.0}, "true_cfg_scale has no effect without a negative_p"),
        ({"model": "flux-dev", "true_cfg_scale": 4.0, "negative_prompt": ""}, None),
        (
            {"model": "flux-dev", "args": {"negative_prompt_2": "blurry"}},
            "negative_prompt_2 has no effect without guidance",
        ),
        (
            {"model": "sd", "args": {"guidance_rescale": 0.7}, "guidance_scale": 1.0},
            "guidance_rescale has no effect without guidance",
        ),
        ({"model": "sd", "args": {"guidance_rescale": 0.7}}, None),
        (
            {"model": "sd", "args": {"eta": 1.0}, "scheduler": {"class": "euler"}},
            "args.eta has no effect with EulerDiscreteScheduler, whose steps take none",
        ),
        ({"model": "sd", "args": {"eta": 1.0}, "scheduler": {"class": "ddim"}}, None),
        ({"model": "shapes", "prompt": "a (red:1.3) circle"}, "weights such as (red:1.3) in a prompt"),
        ({"model": "shapes", "prompt": "a fox (at 5:30 pm)"}, None),
        ({"model": "shapes", "prompt": "<lora:x:0.8> a fox"}, "<lora:...> in a prompt loads no LoRA"),
        ({"model": "shapes", "prompt": "a {red|blue} fox"}, "{a|b} and __a__ in a prompt are plain text"),
        (
            {"model": "shapes", "prompt": "a __tools/animal__ fox"},
            "{a|b} and __a__ in a prompt are plain text;",
        ),
        ({"model": "shapes", "prompt": "a snake__case__name"}, None),
        ({"model": "shapes", "prompt": "a fox, embedding:easy-v2."}, "embedding:name in a prompt loads no"),
        (
            {"model": "flux-dev", "args": {"prompt_2": "<lyco:ink:1> a fox"}},
            "<lora:...> in a prompt loads no",
        ),
        (
            {"model": "flux-dev", "args": {"prompt_2": ""}},
            "args.prompt_2 has no effect: an empty text stands for that of prompt",
        ),
        ({"model": "shapes", "prompt": "a fox --w 64 --n ugly"}, "options in a prompt are plain text"),
        ({"model": "shapes", "prompt": "a rock--paper -- scissors"}, None),
    ],
)
def test_what_has_no_effect_is_warned_about(fields, warned):
    found = warnings_of(width=64, height=64, **fields)
    assert len(found) == (warned is not None), found
    assert warned is None or found[0].startswith(warned)


LITERAL = '((red)), [blue], AND and BREAK in a prompt are plain text without "prompt_syntax": "a1111"'


@pytest.mark.parametrize("text", ["(red:-1.3)", "((red))", "[blue]", "x AND y", "x BREAK y", "(((a b)))"])
def test_words_of_a1111_are_warned_about_where_they_could_act(text):
    assert warnings_of(model="sd", prompt=f"a {text} fox") == [LITERAL]
    assert warnings_of(model="sd", prompt="a fox", negative_prompt=text) == [LITERAL]
    assert warnings_of(model="sd3", prompt=f"a {text} fox") == []


@pytest.mark.parametrize("text", ["a cat (black)", "a [1] cat", "AND1, BREAKFAST", "and", "f(g(x))"])
def test_what_people_write_is_no_word_of_a1111(text):
    assert warnings_of(model="sd", prompt=text) == []


@pytest.mark.parametrize("text", ["(red:1.3)", "((red))", "[blue]", "x BREAK y"])
def test_weights_that_act_are_not_warned_about(text):
    assert warnings_of(model="sd", prompt=f"a {text} fox", prompt_syntax="a1111") == []


def test_details_name_what_stands_in_the_prompt():
    jobs, _ = admit(
        [JobSpec(id="a", prompt="a fox --w 64 --n ugly")], default_model="shapes", find_model=find_weightless
    )
    kind = "options in a prompt are plain text; use fields of the job"
    assert jobs[0].info.warnings == (Warned(kind, "--w, --n"),)


@pytest.mark.parametrize("prompt", ["a sign (aspect ratio 16:9)", "we meet (12:30)", "it says --stop-- now"])
def test_what_people_write_in_prompts_is_no_weight_and_no_option(prompt):
    assert not any(pattern.search(prompt) for pattern in admission.IN_PROMPTS.values())


@pytest.mark.parametrize(
    ("model", "size", "turned", "is_told"),
    [
        ("shapes", (64, 64), 1, False),
        ("shapes", (128, 64), 1, True),
        ("shapes", (128, 64), 6, False),
        ("img2img", (128, 64), 1, True),
        ("kontext", (128, 64), 1, False),
    ],
)
def test_a_picture_of_other_proportions_is_told(model, size, turned, is_told, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "kontext", geometry_of("FluxKontextPipeline", transformer={}))
    exif = Image.Exif()
    exif[274] = turned
    Image.new("RGB", (64, 128) if turned > 4 else (64, 64)).save(tmp_path / "a.png", exif=exif)
    width, height = size
    found = warnings_of(
        model=model, width=width, height=height, image=str(tmp_path / "a.png"), image_sha256=f"{turned}"
    )
    assert ("a picture is stretched to other proportions" in found) is is_told


@pytest.mark.parametrize(("fps", "is_told"), [(None, True), (30, False), (29.97, False), (24, True)])
def test_a_video_of_another_rate_than_the_jobs_is_told(fps, is_told, tmp_path, monkeypatch):
    geometry = geometry_of("WanVideoToVideoPipeline", transformer={"patch_size": [1, 2, 2]})
    monkeypatch.setitem(MODELS, "v2v", geometry)
    files = {"video": str(write_videos(tmp_path) / "even.mp4")}
    found = warnings_of(model="v2v", width=64, height=32, fps=fps, files=files, files_sha256={"video": ""})
    assert found == [RATE] * is_told


@pytest.mark.parametrize("model", ["dynamic", "tiny-qwen-image"])
def test_a_shift_that_the_size_sets_is_refused(model, monkeypatch):
    monkeypatch.setitem(
        MODELS,
        "dynamic",
        geometry_of(
            "FluxPipeline",
            scheduler={"use_dynamic_shifting": True},
            index={"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]},
        ),
    )

    def problems(**options):
        spec = JobSpec(id="a", prompt="a fox", model=model, scheduler=options)
        return [str(each) for each in admit([spec], default_model="shapes", find_model=find)[1]]

    reason = 'has no effect, because the size sets the shift; add "use_dynamic_shifting": false'
    assert problems(shift=3) == [f"scheduler.shift = 3: {reason}"]
    assert problems(shift=3, use_dynamic_shifting=False) == []
    assert problems(shift=1.0, base_shift=1.1, max_shift=1.1) == []
    # One class names it otherwise, another one has no shift that the size sets.
    assert problems(**{"class": "UniPCMultistepScheduler"}, flow_shift=3) == [
        f"scheduler.flow_shift = 3: {reason}"
    ]
    assert problems(**{"class": "FlowMatchHeunDiscreteScheduler"}, shift=3) == []


@pytest.mark.parametrize(
    ("own", "config", "predicted"),
    [
        ("DPMSolverMultistepScheduler", {"prediction_type": "flow_prediction"}, None),
        ("FlowMatchEulerDiscreteScheduler", {}, None),
        ("DDIMScheduler", {}, "epsilon"),
        ("DDIMScheduler", {"prediction_type": "v_prediction"}, "v_prediction"),
    ],
)
def test_noise_levels_of_flow_are_refused_for_other_outputs(own, config, predicted, monkeypatch):
    index = {"scheduler": ["diffusers", own]}
    monkeypatch.setitem(MODELS, "m", geometry_of("StableDiffusionPipeline", scheduler=config, index=index))

    def problems(**options):
        options = {"class": "DEISMultistepScheduler", "use_flow_sigmas": True, **options}
        spec = JobSpec(id="a", prompt="a fox", model="m", scheduler=options)
        return [str(each) for each in admit([spec], default_model="shapes", find_model=find)[1]]

    start = f"scheduler.use_flow_sigmas = true: the model predicts {predicted}; leave it out"
    assert [each.startswith(start) for each in problems()] == [True] * (predicted is not None)
    assert problems(use_flow_sigmas=False) == problems(prediction_type="flow_prediction") == []


@pytest.mark.parametrize(
    ("name", "is_right"),
    [
        ("DEISMultistepScheduler", True),
        ("FlowMatchHeunDiscreteScheduler", True),
        ("euler a", True),
        ("DDIMScheduler", False),
        ("EulerDiscreteScheduler", False),
    ],
)
def test_a_scheduler_that_takes_flow_for_something_else_is_refused(name, is_right, monkeypatch):
    index = {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    monkeypatch.setitem(MODELS, "m", geometry_of("StableDiffusion3Pipeline", index=index))
    spec = JobSpec(id="a", prompt="a fox", model="m", scheduler={"class": name})
    jobs, problems = admit([spec], default_model="shapes", find_model=find)
    start = f"scheduler.class = {name}: makes noise, because the model predicts flow"
    assert [str(each).startswith(start) for each in problems] == [True] * (not is_right)
    options = jobs[0].spec.scheduler if jobs else None
    assert name != "DEISMultistepScheduler" or options == {"class": name, **OF_FLOW}
