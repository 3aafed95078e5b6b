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
from typing import Any

import httpx
import pytest
from PIL import Image
from serving import Server, fake_server

from gfgen.job.samplers import SCHEDULES, known_sampler
from gfgen.server.protocol.a1111_schemas import SAMPLER_NAMES, SCHEDULE_NAMES

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


def refusal(door: Server, path: str = "txt2img", **body: Any) -> dict[str, Any]:
    answer = door.post(f"/sdapi/v1/{path}", **{"prompt": "a fox", **body})
    assert answer.status_code in (400, 404, 422), answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def made(door: Server, **body: Any) -> dict[str, Any]:
    answer = door.post("/sdapi/v1/txt2img", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    for text in found["images"]:
        assert Image.open(io.BytesIO(base64.b64decode(text))).format == "PNG"
    return found


def test_open_webui_gets_its_pictures_with_its_password(door: Server) -> None:
    with httpx.Client(base_url=door.url, auth=("user", KEY), timeout=30) as client:
        options = client.get("/sdapi/v1/options").json()
        assert options["sd_model_checkpoint"] == "fake-image"
        titles = [each["title"] for each in client.get("/sdapi/v1/sd-models").json()]
        assert titles == ["fake-image", "other"]
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
    assert info["sampler_name"] == "DPM++ 2M"
    (text,) = info["infotexts"]
    assert text.startswith("a red fox\nNegative prompt: blurry\nSteps: 3, Sampler: DPM++ 2M, CFG scale: 7")
    assert found["parameters"]["hr_upscaler"] == "Latent"


def test_sillytavern_can_read_every_list(door: Server) -> None:
    lists = {
        name: door.http.get(f"/sdapi/v1/{name}").json()
        for name in ("samplers", "schedulers", "upscalers", "latent-upscale-modes", "sd-vae", "loras")
    }
    assert [each["name"] for each in lists["samplers"]] == list(SAMPLER_NAMES)
    assert [each["name"] for each in lists["upscalers"]] == ["None"]
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
    assert refusal(door, enable_hr=True)["param"] == "enable_hr"
    assert refusal(door, override_settings={"sd_model_checkpoint": "absent"})["code"] == "model_not_found"
    assert refusal(door, "img2img")["param"] == "init_images"
    assert refusal(door, cfg_scale=-1)["param"] == "cfg_scale"
    warned = made(door, prompt="a fox", restore_faces=True, override_settings={"sd_vae": "x"}, odd=1)
    assert [each.partition(":")[0] for each in warned["warnings"]] == ["restore_faces", "sd_vae", "odd"]


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
