"""A1111's API, with the requests of Open WebUI and SillyTavern as these send them.

Source: Open WebUI's routers/images.py; SillyTavern's src/endpoints/stable-diffusion.js and the body that its
extension stable-diffusion makes.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from serving import Server, fake_server, free_port
from small_checkpoints import save_checkpoint
from small_pipelines import PIPELINES

from gfgen.job.samplers import SCHEDULES, known_sampler
from gfgen.server.http.a1111 import SAMPLER_NAMES, SCHEDULE_NAMES, A1111Request
from gfgen.server.protocol.problems import ApiError, checked

KEY = "a key of eight"
OPEN_WEBUI = {"prompt": "a red fox", "batch_size": 2, "width": 64, "height": 64, "steps": 3}
SILLY_TAVERN = {
    "prompt": "a red fox",
    "negative_prompt": "blurry",
    "sampler_name": "DPM++ 2M",
    "scheduler": "Automatic",
    "steps": 3,
    "cfg_scale": 7,
    "width": 64,
    "height": 64,
    "restore_faces": False,
    "enable_hr": False,
    "hr_upscaler": "Latent",
    "hr_scale": 2,
    "hr_additional_modules": [],
    "denoising_strength": 0.7,
    "hr_second_pass_steps": 0,
    "seed": 7,
    "override_settings": {"CLIP_stop_at_last_layers": 1},
    "override_settings_restore_afterwards": True,
    "clip_skip": 1,
    "save_images": True,
    "send_images": True,
    "do_not_save_grid": False,
    "do_not_save_samples": False,
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = fake_server(tmp_path_factory.mktemp("a1111"), a1111=1, key=KEY, alias="other=fake-image")
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def pixels(answer: dict[str, Any]) -> tuple[tuple[int, int], bytes]:
    picture = Image.open(io.BytesIO(base64.b64decode(answer["images"][0])))
    return picture.size, picture.tobytes()


def refusal(door: Server, path: str = "txt2img", **body: Any) -> dict[str, Any]:
    answer = door.post(f"/sdapi/v1/{path}", **{"prompt": "a fox", **body})
    assert answer.status_code in (400, 404, 422), answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def made(door: Server, *, path: str = "txt2img", **body: Any) -> dict[str, Any]:
    answer = door.post(f"/sdapi/v1/{path}", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    for text in found["images"]:
        assert Image.open(io.BytesIO(base64.b64decode(text))).format == "PNG"
    return found


def as_class(sampler: str) -> str:
    """Of an infotext."""
    return f'scheduler: "{{\\"class\\": \\"{sampler}\\"}}"'


def test_open_webui_gets_its_pictures_with_its_password(door: Server) -> None:
    with httpx.Client(base_url=door.url, auth=("user", KEY), timeout=30) as client:
        options = client.get("/sdapi/v1/options").json()
        assert options["sd_model_checkpoint"] == "fake-image"
        titles = [each["title"] for each in client.get("/sdapi/v1/sd-models").json()]
        assert titles == ["fake-image", "fake-edit", "other"]
        answer = client.post("/sdapi/v1/options", json={**options, "sd_model_checkpoint": "other"})
        assert (answer.status_code, answer.json()) == (200, {})
        assert client.get("/sdapi/v1/options").json()["sd_model_checkpoint"] == "other"
        client.post("/sdapi/v1/options", json={"sd_model_checkpoint": "fake-image"})
        answer = client.post("/sdapi/v1/txt2img", json=OPEN_WEBUI)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["images"]) == 2
    first, second = json.loads(answer.json()["info"])["all_seeds"]
    assert second == first + 1
    with httpx.Client(base_url=door.url, auth=("user", "wrong")) as client:
        assert client.get("/sdapi/v1/options").status_code == 401


def test_sillytavern_gets_its_picture_without_a_warning(door: Server) -> None:
    found = made(door, **SILLY_TAVERN)
    assert found["warnings"] is None
    info = json.loads(found["info"])
    assert info["seed"] == 7
    (text,) = info["infotexts"]
    assert text.startswith("a red fox\nNegative prompt: blurry\nSteps: 3, CFG scale: 7.0, Seed: 7, ")
    assert as_class("DPM++ 2M") in text
    assert found["parameters"]["hr_upscaler"] == "Latent"


def test_sillytavern_can_read_every_list(door: Server) -> None:
    lists = {
        name: door.http.get(f"/sdapi/v1/{name}").json()
        for name in ("samplers", "schedulers", "upscalers", "latent-upscale-modes", "sd-vae", "loras")
    }
    assert [each["name"] for each in lists["samplers"]] == list(SAMPLER_NAMES)
    assert [each["name"] for each in lists["upscalers"]] == ["None", "Lanczos"]
    assert lists["latent-upscale-modes"] == lists["sd-vae"] == lists["loras"] == []
    progress = door.http.get("/sdapi/v1/progress").json()
    assert (progress["progress"], progress["state"]["job_count"]) == (0.0, 0)


def test_every_listed_sampler_and_schedule_is_one_of_job_files() -> None:
    assert all("class" in (known_sampler(name, is_flow=False) or {}) for name in SAMPLER_NAMES)
    assert all(name.lower().replace(" ", "_") in SCHEDULES for name in SCHEDULE_NAMES)


def test_what_cannot_act_is_refused_or_warned_about(door: Server) -> None:
    assert refusal(door, sampler_name="Eulor")["message"].startswith(
        "sampler_name: 'Eulor' is unknown; there are"
    )
    assert refusal(door, scheduler="Kerras")["param"] == "scheduler"
    assert refusal(door, script_name="x/y/z plot")["param"] == "script_name"
    assert refusal(door, alwayson_scripts={"ADetailer": {"args": [True]}})["param"] == "alwayson_scripts"
    assert refusal(door, enable_hr=True, hr_upscaler="4x-UltraSharp")["param"] == "hr_upscaler"
    assert refusal(door, "img2img", enable_hr=True, init_images=["x"])["param"] == "enable_hr"
    assert refusal(door, override_settings={"sd_model_checkpoint": "absent"})["code"] == "model_not_found"
    assert refusal(door, "img2img")["param"] == "init_images"
    assert refusal(door, cfg_scale=-1)["param"] == "cfg_scale"
    warned = made(door, prompt="a fox", restore_faces=True, override_settings={"sd_vae": "x"}, odd=1)
    assert [each.partition(":")[0] for each in warned["warnings"]] == ["odd", "restore_faces", "sd_vae"]


def test_strict_refuses_what_has_no_effect(tmp_path: Path) -> None:
    strict = fake_server(tmp_path, a1111=1, strict=1).wait_ready()
    try:
        assert refusal(strict, restore_faces=True)["message"].startswith("restore_faces: only False has")
        assert refusal(strict, clip_skip=2)["message"].startswith("clip_skip: only 1 has")
        assert refusal(strict, override_settings={"sd_vae": "x"})["message"].startswith("sd_vae: only Auto")
        assert refusal(strict, "options", sd_vae="x")["message"].startswith("prompt: unknown")
        assert "odd: not a field" in refusal(strict, odd=1)["message"]
        assert made(strict, **SILLY_TAVERN)["warnings"] is None
    finally:
        strict.stop()


def test_a_schedule_follows_its_sampler(door: Server) -> None:
    for sampler, schedule, expected in (
        ("DPM++ 2M", "karras", "DPM++ 2M karras"),
        ("DPM++ 2M Karras", "Karras", "DPM++ 2M Karras"),
        ("Euler a", "Automatic", "Euler a"),
    ):
        found = made(door, prompt="a fox", sampler_name=sampler, scheduler=schedule)
        assert as_class(expected) in json.loads(found["info"])["infotexts"][0]


def test_a_second_pass_is_a_field_of_its_job() -> None:
    def second_pass(**fields: Any) -> dict[str, Any]:
        given = {"prompt": "a fox", "enable_hr": True, "width": 512, "height": 768, "steps": 20, **fields}
        asked_for = checked(A1111Request, given)
        asked_for.check()
        return {name: value for name, value in asked_for.job.items() if name == "args" or "upscale" in name}

    usual = {"upscale": 2.0, "upscale_strength": 0.75, "upscale_steps": 27}
    assert second_pass() == second_pass(hr_scale=2, hr_resize_x=0, hr_upscaler="None") == usual
    for part in range(1, 21):  # so many steps run
        steps = second_pass(denoising_strength=part / 20)["upscale_steps"]
        assert int(steps * part / 20 + 1e-9) == 20
    assert second_pass(denoising_strength=0.5, hr_second_pass_steps=8)["upscale_steps"] == 16
    assert second_pass(denoising_strength=1e-300)["upscale_steps"] == 1000
    assert second_pass(hr_resize_x=768)["upscale"] == second_pass(hr_resize_y=1152)["upscale"] == 1.5
    assert second_pass(hr_resize_x=768, hr_resize_y=1152)["upscale"] == 1.5
    assert second_pass(enable_hr=False, denoising_strength=0.5) == {"args": {"strength": 0.5}}
    for fields, reason in (
        ({"hr_resize_x": 768, "hr_resize_y": 768}, "hr_resize_x: a size of the shape of width and height"),
        ({"hr_resize_x": 768, "width": None, "height": None}, "hr_resize_x: a size of the shape"),
        ({"denoising_strength": 0}, "denoising_strength: more than 0"),
        ({"hr_upscaler": "R-ESRGAN"}, "hr_upscaler: 'R-ESRGAN' is unknown; there are None, Lanczos"),
    ):
        with pytest.raises(ApiError, match=reason):
            second_pass(**fields)
    latent = checked(A1111Request, {"prompt": "a fox", "enable_hr": True, "hr_upscaler": "Latent (nearest)"})
    (warning,) = latent.check()
    assert warning == "hr_upscaler: Latent (nearest) is not supported; the picture is enlarged by Lanczos"


def test_patches_in_a_prompt_are_those_of_its_job(door: Server) -> None:
    job = checked(A1111Request, {"prompt": "a fox <lora:ink:0.5>, wet <lora:old>"}).job
    assert job["prompt"] == "a fox , wet"
    assert job["lora"] == [{"name": "ink", "scale": 0.5}, {"name": "old", "scale": 1.0}]
    error = refusal(door, prompt="a fox <lora:ink:x>")
    assert 'scale is "x"; from -' in error["message"]


def test_a_model_that_takes_a_picture_makes_one_at_its_strength(door: Server) -> None:
    (first,) = made(door, prompt="a fox")["images"]
    fields: dict[str, Any] = {"prompt": "a wolf", "width": 64, "height": 64, "init_images": [first]}
    fields["override_settings"] = {"sd_model_checkpoint": "fake-edit"}
    found = made(door, path="img2img", **fields, denoising_strength=0.5)
    info = json.loads(found["info"])
    assert info["sd_model_name"] == "fake-edit"
    assert 'args: "{\\"strength\\": 0.5}"' in info["infotexts"][0]
    assert "init_images" not in found["parameters"]
    usual = made(door, path="img2img", **fields | {"init_images": [f"data:image/png;base64,{first}"]})
    assert '{\\"strength\\": 0.75}' in json.loads(usual["info"])["infotexts"][0]


def test_a_model_of_texts_alone_says_what_to_serve(door: Server) -> None:
    (first,) = made(door, prompt="a fox")["images"]
    named = refusal(
        door, "img2img", init_images=[first], override_settings={"sd_model_checkpoint": "fake-image"}
    )
    assert (named["param"], named["message"]) == (
        "init_images",
        "init_images: model fake-image makes pictures from text only; name fake-edit",
    )
    assert refusal(door, "img2img", init_images=[first], mask=first)["param"] == "mask"
    assert refusal(door, "img2img", init_images=["no"])["param"] == "init_images"
    assert refusal(door, init_images=[first])["param"] == "init_images"


def test_progress_has_a_fraction_and_the_predicted_end(door: Server) -> None:
    slow = door.post(
        "/v1/jobs", model="fake-image", prompt="slow", flow_shift=20.0, steps=2, tag="a1111"
    ).json()["id"]
    door.wait_for(slow, "in_progress")
    deadline_s = time.monotonic() + 30
    while True:  # until a prediction that stays for this long
        before, before_s = door.job(slow), time.time()
        found, after_s = door.http.get("/sdapi/v1/progress").json(), time.time()
        end = before["predicted_completion_at"]
        if end is not None and before["stage"] == "denoise" and door.job(slow) == before:
            break
        assert time.monotonic() < deadline_s, door.log
    assert 0 < found["progress"] == before["progress"] / 100 < 1
    assert end - after_s - 0.01 <= found["eta_relative"] <= end - before_s + 0.01
    assert found["state"] == {"job_count": 1}
    door.http.post("/sdapi/v1/interrupt")
    assert door.job(slow)["status"] == "cancelled"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers, when it saves
def test_tiny_checkpoints_make_pictures_from_text_and_from_a_picture(tmp_path: Path) -> None:
    save_checkpoint("StableDiffusionXLPipeline", tmp_path / "sd")
    sdxl = PIPELINES["StableDiffusionXLPipeline"]
    save_checkpoint("StableDiffusionXLImg2ImgPipeline", tmp_path / "edit", changes=sdxl)
    port = free_port()
    command = ["-m", "gfgen", "serve", "--port", str(port), "--ranks", "1", "--a1111", "-o", "out"]
    tiny = Server([*command, "--model", "sd", "--model", "edit"], port=port, folder=tmp_path, slowness=3.0)
    try:
        tiny.wait_ready()
        found = made(tiny, **SILLY_TAVERN)
        assert found["warnings"] is None
        weighted = made(tiny, **SILLY_TAVERN | {"prompt": "a (red:1.3) fox"})
        assert weighted["warnings"] is None
        assert weighted["images"] != found["images"]
        picture = Image.open(io.BytesIO(base64.b64decode(found["images"][0])))
        assert picture.info["parameters"] == json.loads(found["info"])["infotexts"][0]
        karras = made(tiny, **SILLY_TAVERN | {"scheduler": "Karras"})
        assert karras["images"] != made(tiny, **SILLY_TAVERN)["images"]
        start = {**SILLY_TAVERN, "steps": 4, "init_images": found["images"]}
        weak, strong = (
            made(tiny, path="img2img", **start | {"denoising_strength": strength}) for strength in (0.3, 0.9)
        )
        assert weak["images"] != strong["images"]
        assert Image.open(io.BytesIO(base64.b64decode(weak["images"][0]))).size == (64, 64)
        assert json.loads(weak["info"])["sd_model_name"] == "edit"
        large = {"enable_hr": True, "hr_upscaler": "Lanczos", "hr_scale": 1.5, "denoising_strength": 0.5}
        both = made(tiny, **SILLY_TAVERN | large)
        assert both["warnings"] is None
        side = {"width": 96, "height": 96, "steps": 6, "denoising_strength": 0.5}
        by_hand = made(tiny, path="img2img", **start | side)
        assert pixels(both) == pixels(by_hand)
    finally:
        tiny.stop()


def test_interrupt_cancels_the_jobs_of_this_door_alone(door: Server) -> None:
    slow = door.post("/v1/jobs", model="fake-image", prompt="slow", flow_shift=20.0, steps=1).json()["id"]
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            door.post("/sdapi/v1/txt2img", prompt="a fox", batch_size=100, steps=1000)
        )
    )
    waiting.start()
    deadline_s = time.monotonic() + 30
    while door.http.get("/sdapi/v1/progress").json()["state"]["job_count"] == 0:
        assert time.monotonic() < deadline_s, door.log
        time.sleep(0.01)
    assert door.http.post("/sdapi/v1/interrupt").status_code == 200
    waiting.join(30)
    assert answers[0].status_code == 409
    assert "cancelled" in answers[0].text
    assert door.job(slow)["status"] in ("queued", "in_progress")
    door.http.post(f"/v1/jobs/{slow}/cancel")


def test_without_the_option_there_is_no_such_path(server: Server) -> None:
    assert server.http.get("/sdapi/v1/options").status_code == 404
