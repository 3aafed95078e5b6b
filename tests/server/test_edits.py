"""Edits by real pipelines with random weights: several pictures, and a mask."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image
from serving import Server, free_port
from small_checkpoints import save_checkpoint

from gfgen.server.jobs.job_requests import painted_part
from gfgen.server.protocol.problems import ApiError

SIZE = (64, 64)
FIELDS = {"prompt": "a red cat", "size": "64x64", "num_inference_steps": "2", "seed": "5"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    save_checkpoint("Flux2KleinPipeline", folder / "several")
    save_checkpoint("FluxInpaintPipeline", folder / "inpaint")
    port = free_port()
    command = ["-m", "gfgen", "serve", "--port", str(port), "--ranks", "1", "-o", "out"]
    command += ["--model", "several", "--model", "inpaint", "--served-model-name", "*=several"]
    server = Server(command, port=port, folder=folder, slowness=3.0)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def png(colour: str | tuple[int, int, int, int], *, hole: tuple[int, int, int, int] | None = None) -> bytes:
    picture = Image.new("RGB" if hole is None else "RGBA", SIZE, colour)
    if hole is not None:
        picture.paste((255, 255, 255, 0), hole)
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return content.getvalue()


def edited(server: Server, *files: tuple[str, bytes], **fields: str) -> bytes:
    answer = server.http.post("/v1/images/edits", data=FIELDS | fields, files=list(files))
    assert answer.status_code == 200, answer.text + server.log
    return bytes(server.http.get(f"/v1/jobs/{answer.json()['data'][0]['id']}/content").content)


def test_models_say_what_they_take(server: Server) -> None:
    several, inpaint = server.http.get("/v1/models").json()["data"]
    assert (several["takes_image"], several["takes_several"], several["mask_argument"]) == (
        "yes",
        True,
        None,
    )
    assert (inpaint["takes_image"], inpaint["takes_several"], inpaint["mask_argument"]) == (
        "always",
        False,
        "mask_image",
    )


def test_the_line_of_a_masked_job_says_that_it_had_a_mask(server: Server) -> None:
    model = {"model": server.http.get("/v1/models").json()["data"][1]["id"]}
    files = [("image", png("red")), ("mask", png("black", hole=(0, 0, 32, 64)))]
    answer = server.http.post("/v1/images/edits", data=FIELDS | model, files=files)
    line = server.http.get(f"/v1/jobs/{answer.json()['data'][0]['id']}/line").json()
    assert (line["image"], list(line["files"])) == ("image.png", ["mask_image"])


def test_every_picture_counts(server: Server) -> None:
    red, blue = ("image[]", png("red")), ("image[]", png("blue"))
    assert len({edited(server, red), edited(server, red, blue), edited(server, red, red)}) == 3


def test_the_place_of_a_mask_counts(server: Server) -> None:
    image = ("image", png("gray"))
    left = edited(server, image, ("mask", png("black", hole=(0, 0, 32, 64))))
    right = edited(server, image, ("mask", png("black", hole=(32, 0, 64, 64))))
    assert left != right


def test_an_inpainting_model_asks_for_its_mask(server: Server) -> None:
    answer = server.http.post(
        "/v1/images/edits", data=FIELDS | {"model": "inpaint"}, files={"image": png("gray")}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (422, "mask")
    assert error["message"].startswith("mask: missing; FluxInpaintPipeline needs a picture")


@pytest.mark.parametrize("size", [(1, 1), (4000, 1)])
def test_a_picture_that_the_pipeline_refuses_is_no_error_of_the_server(
    server: Server, size: tuple[int, int]
) -> None:
    content = io.BytesIO()
    Image.new("RGB", size).save(content, format="PNG")
    answer = server.http.post("/v1/images/edits", data=FIELDS, files={"image": content.getvalue()})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "cannot_be_done"), error
    assert "must be at least 64px" in error["message"]


def test_any_other_name_stands_for_the_model_of_the_star(server: Server) -> None:
    fields = FIELDS | {"model": "dall-e-3"}
    answer = server.http.post("/v1/images/generations", json=fields).json()
    assert answer["model"] == "several"
    assert "model dall-e-3: not served here; several runs in its place" in server.log
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["several", "inpaint"]
    line = '{"prompt": "a red cat", "size": "64x64", "steps": 1, "model": "gpt-image-1"}'
    batch = server.http.post("/v1/batches", content=line).json()
    jobs = server.http.get("/v1/jobs", params={"batch_id": batch["id"]}).json()["data"]
    assert [job["model"] for job in jobs] == ["several"]


def test_what_is_transparent_is_painted() -> None:
    painted = Image.open(io.BytesIO(painted_part(png("black", hole=(8, 0, 16, 64)), png("red"))))
    assert (painted.mode, painted.getbbox(), painted.getextrema()) == ("L", (8, 0, 16, 64), (0, 255))


def test_half_transparent_is_not_painted() -> None:
    faint = Image.new("RGBA", SIZE, (0, 0, 0, 1))
    content = io.BytesIO()
    faint.save(content, format="PNG")
    with pytest.raises(ApiError, match="mask: nothing in it is transparent"):
        painted_part(content.getvalue(), png("red"))
