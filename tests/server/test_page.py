"""The page at /, in headless Chromium: on a fake of what it is built on, and once on the real server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import page_states as states
import pytest
from fake_server import FakeServer
from PIL import Image

from gfgen.server.protocol import server_schemas
from gfgen.server.protocol.problems import ApiError

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)")

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, *, may_complain: bool = False, **options: Any) -> Iterator[Any]:
    """The page at that address; no error and no breach of the content security policy may come of it."""
    context = browser.new_context(**({"viewport": DESKTOP} | options))
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    assert may_complain or not complaints


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(states.live()) as server:
        yield server


@pytest.fixture
def fake(shared: FakeServer) -> FakeServer:
    shared.begin(states.live())
    return shared


def settle(page: Any) -> None:
    """Until what has come is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def shown(page: Any, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


# What is shown --------------------------------------------------------------------------------------


def test_the_page_shows_ranks_queue_and_results(browser, fake):
    fake.files |= dict.fromkeys(("done", "done?thumbnail"), (states.png(), "image/png"))
    fake.state = states.live(
        ranks=[states.rank(0, "fox"), states.rank(1, status="lost", restarts=1)],
        open=[
            states.running("fox", 0, prompt="a red fox", step=3),
            states.job("whale", prompt="a whale", position=1, priority=5, tag="L"),
        ],
        finished=[
            states.ended("done", prompt="a boat"),
            states.ended("bad", status="failed", prompt="a tram"),
        ],
    )
    with opened(browser, fake.url) as page:
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#ranks li").nth(0)).to_contain_text("step 4 of 10")
        expect(page.locator("#ranks li").nth(1)).to_contain_text("lost")
        expect(page.locator("#queue-count")).to_have_text("1 running, 1 waiting")
        expect(page.locator("#queue .job").nth(1)).to_contain_text("10 steps \u00b7 L")
        expect(page.locator("#queue .job").nth(1)).to_contain_text("next")
        expect(page.locator("#results .tile")).to_have_count(2)
        expect(page.get_by_role("button", name="a tram, image, failed")).to_be_visible()
        expect(page.locator("#results img")).to_have_js_property("naturalWidth", 64)
        expect(page.locator("#results-count")).to_have_text("1 completed, 1 failed")
        expect(page.locator("#deciding")).to_have_text("srtf decides")


def test_an_empty_server_says_so(browser, fake):
    fake.state = states.live(status="loading", reason="the models are loading", ranks=[], models=[])
    with opened(browser, fake.url) as page:
        expect(page.locator("#status")).to_have_text("loading")
        expect(page.get_by_text("No open jobs.")).to_be_visible()
        page.locator("#prompt").fill("a fox")
        page.locator("#send").click(force=True)
        expect(page.locator("#sent")).to_have_text("the models are loading")
    assert fake.asked == []


def colours_of_lanes(page: Any, num_ranks: int, *, before_now_s: float) -> list[str]:
    """The colour in the middle of each lane at a time before now, of a span of 60 s."""
    return page.evaluate(
        """([numRanks, secondsAgo]) => {
          const canvas = document.getElementById("timeline");
          const lane = parseFloat(getComputedStyle(document.querySelector("#ranks li")).height);
          const width = canvas.clientWidth * 0.94;
          const x = (width - (secondsAgo * width) / 60) * devicePixelRatio;
          const brush = canvas.getContext("2d");
          return [...Array(numRanks).keys()].map((rank) => {
            const y = (rank * lane + lane - 6) * devicePixelRatio;
            return [...brush.getImageData(x, y, 1, 1).data.slice(0, 3)].join(",");
          });
        }""",
        [num_ranks, before_now_s],
    )


def test_a_job_has_one_colour_in_all_the_lanes_that_it_has_at_a_time(browser, fake):
    wide = [states.bar("fox", rank, begin=-20, end=-10, ranks=(0, 1, 3)) for rank in (0, 1, 3)]
    alone = [states.bar("whale", 2, begin=-20), states.bar("fox", 0, begin=-10)]
    jobs = [states.running("fox", 0), states.running("whale", 2)]
    fake.state = states.live(open=jobs, timeline=[*wide, *alone], ranks=[states.rank(n) for n in range(5)])
    with opened(browser, fake.url) as page:
        expect(page.locator("#legend li")).to_have_count(2)
        settle(page)
        first, second, third, fourth, idle = colours_of_lanes(page, 5, before_now_s=15)
        assert first == second == fourth
        assert len({first, third, idle}) == 3
        later = colours_of_lanes(page, 5, before_now_s=5)
        assert later == [first, idle, third, idle, idle]


def test_changes_are_put_in(browser, fake):
    fake.state = states.live(
        open=[states.running("fox", 0), states.job("whale", position=1), states.job("boat", position=2)],
        finished=[states.ended("old", status="failed")],
    )
    with opened(browser, fake.url) as page:
        expect(page.locator("#queue .job")).to_have_count(3)
        fake.tell(open=[states.running("fox", 0, step=7)], order=["fox", "boat", "whale"], num_open=3)
        expect(page.locator("#queue progress").first).to_have_js_property("value", 70)
        assert [row.split("\n")[0] for row in shown(page, "#queue .job")] == [
            "prompt of fox",
            "prompt of boat",
            "prompt of whale",
        ]
        fake.files |= dict.fromkeys(("fox", "fox?thumbnail"), (states.png(), "image/png"))
        fake.tell(
            open=[], order=["boat", "whale"], num_open=2, finished=[states.ended("fox")], removed=["old"]
        )
        expect(page.locator("#queue .job")).to_have_count(2)
        expect(page.locator("#stage-prompt")).to_have_text("prompt of fox")
        expect(page.locator("#results .tile")).to_have_count(1)
        fake.tell(status="draining", reason="the server is stopping")
        expect(page.locator("#status")).to_have_text("draining")


def test_the_queue_says_whether_deadlines_will_be_met(browser, fake):
    now = states.time.time()
    fake.state = states.live(
        open=[
            states.running("met", 0, deadline_at=now + 600, will_meet_deadline=True),
            states.running("late", 1, deadline_at=now + 10, will_meet_deadline=False),
            states.running("past", 1, deadline_at=now - 60, will_meet_deadline=False),
            states.running("none", 1),
        ]
    )
    with opened(browser, fake.url) as page:
        rows = page.locator("#queue .job-deadline")
        expect(rows.nth(0)).to_contain_text("\u2713 due in ")
        expect(rows.nth(1)).to_contain_text("s late")
        expect(rows.nth(2)).to_contain_text("s late")
        expect(rows.nth(3)).to_have_text("no deadline")


def test_a_prompt_is_never_markup(browser, fake):
    prompt = "<img src=x onerror=\"document.title='broken into'\"><b>bold</b> \u202eback"
    fake.state = states.live(
        open=[states.running("fox", 0, prompt=prompt)],
        timeline=[states.bar("fox", 0)],
        finished=[
            states.ended(
                "bad",
                status="failed",
                prompt=prompt,
                error=states.schemas.JobFailure(code="x", message=prompt),
            )
        ],
    )
    with opened(browser, fake.url) as page:
        expect(page.locator("#queue .job-prompt")).to_have_text(prompt)
        page.locator("#results button").click()
        expect(page.locator("#viewer-show")).to_contain_text("<b>bold</b>")
        assert page.locator("#queue b, #queue img, #viewer b, #viewer img, #legend img").count() == 0
        assert page.title() == "(1) gfgen"


# What one does --------------------------------------------------------------------------------------


def test_a_job_is_submitted_with_what_the_form_says(browser, fake):
    fake.accepted = states.job("new", position=2, predicted_completion_at=states.time.time() + 20)
    with opened(browser, fake.url) as page:
        expect(page.get_by_label("Size")).to_have_value("128x128")
        page.get_by_label("Prompt", exact=True).fill("a red fox")
        page.get_by_label("Model").select_option("tiny-qwen-image")
        expect(page.get_by_label("Size")).to_have_value("256x256")
        expect(page.get_by_label("Frames")).to_be_hidden()
        page.get_by_label("Steps").fill("12")
        page.get_by_label("Seed").fill(str(2**62 + 1))
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Deadline").fill("90s")
        page.get_by_label("Priority").fill("-3")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_contain_text("Accepted, 2nd in the queue, done in ")
    (asked,) = fake.asked
    assert asked.fields == {
        "prompt": "a red fox",
        "model": "tiny-qwen-image",
        "size": "256x256",
        "steps": "12",
        "seed": str(2**62 + 1),
        "deadline": "90s",
        "priority": "-3",
    }
    assert asked.key


def test_a_picture_goes_along_where_the_model_takes_one(browser, fake):
    fake.accepted = states.job("new", position=1)
    with opened(browser, fake.url) as page:
        page.get_by_label("Prompt", exact=True).fill("the boat turns home")
        picture = {"name": "boat.png", "mimeType": "image/png", "buffer": states.png()}
        page.locator("#image").set_input_files(picture)
        expect(page.get_by_role("img", name="Start image")).to_be_visible()
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_contain_text("Accepted, next in the queue")
    assert fake.asked[0].fields["image"] == "boat.png"


def test_several_jobs_are_submitted_with_seeds_that_count_up(browser, fake):
    fake.accepted = states.job("new")
    with opened(browser, fake.url) as page:
        page.get_by_label("Prompt", exact=True).fill("a red fox")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Guidance").fill("6.5")
        page.get_by_label("FPS").fill("12")
        page.get_by_label("How many").fill("3")
        page.get_by_label("Seed").fill(str(2**63 - 2))
        page.get_by_role("button", name="Submit 3 jobs").click()
        expect(page.locator("#sent")).to_have_text("3 jobs accepted.")
    assert [asked.fields["seed"] for asked in fake.asked] == [str(2**63 - 2), str(2**63 - 1), "0"]
    assert {(asked.fields["guidance_scale"], asked.fields["fps"]) for asked in fake.asked} == {("6.5", "12")}
    assert len({asked.key for asked in fake.asked}) == 3


def test_variations_are_counted_before_they_are_submitted(browser, fake):
    fake.accepted = states.job("new")
    with opened(browser, fake.url) as page:
        page.get_by_label("Prompt", exact=True).fill("a {red|blue} fox in {snow|rain|fog} with {braces}")
        expect(page.get_by_label("Make all 6 variations")).to_be_checked()
        page.get_by_label("How many").fill("2")
        page.get_by_role("button", name="Submit 12 jobs").click()
        expect(page.locator("#sent")).to_have_text("12 jobs accepted.")
        page.get_by_label("Make all 6 variations").uncheck()
        expect(page.get_by_role("button", name="Submit 2 jobs")).to_be_visible()
    prompts = [asked.fields["prompt"] for asked in fake.asked]
    assert prompts[:3] == [f"a red fox in {where} with {{braces}}" for where in ("snow", "rain", "fog")]
    assert len(set(prompts)) == 6
    assert len({asked.key for asked in fake.asked}) == 12


def test_recipes_and_loras_are_choices(browser, fake):
    model = states.MODELS[1].model_copy(update={"recipes": ["lightning-4"], "patches": ["ink", "oil"]})
    fake.state, fake.accepted = states.live(models=[model]), states.job("new")
    with opened(browser, fake.url) as page:
        page.get_by_label("Prompt", exact=True).fill("a red fox")
        page.get_by_label("Recipe").select_option("lightning-4")
        expect(page.get_by_label("Steps")).to_have_value("")
        page.get_by_label("ink", exact=True).check()
        page.get_by_label("Scale of ink").fill("0.8")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_contain_text("Accepted")
    fields = fake.asked[0].fields
    assert (fields["recipe"], json.loads(fields["lora"])) == ("lightning-4", [{"name": "ink", "scale": 0.8}])
    assert "steps" not in fields


def test_the_cost_is_told_while_one_types(browser, fake):
    past = [states.ended("a", rank_s=8.0, inference_time_s=4.0), states.ended("b", status="failed")]
    fake.state = states.live(finished=past)
    fake.files |= dict.fromkeys(("a", "a?thumbnail"), (states.png(), "image/png"))
    with opened(browser, fake.url) as page:
        page.get_by_label("Model").select_option("tiny-qwen-image")
        expect(page.locator("#cost")).to_have_text("About 8.0 s of rank time, done in 4 s")
        page.get_by_label("Steps").fill("20")
        page.get_by_label("How many").fill("3")
        expect(page.locator("#cost")).to_have_text("About 16 s of rank time each, all done in 12 s")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Deadline").fill("5s")
        expect(page.locator("#cost")).to_contain_text("\u2717 7 s late")


def test_the_cost_is_that_of_jobs_of_the_same_size_or_lies_between_others(browser, fake):
    sizes = {"64x64": 11.0, "128x128": 20.0, "512x512": 80.0}
    past = [states.ended(f"{size}-{n}", size=size, rank_s=s) for size, s in sizes.items() for n in range(4)]
    first = [states.ended("first", size="64x64", rank_s=95.0)]  # it waited for its model
    fake.state = states.live(finished=past + first)
    fake.files |= {
        f"{each.id}{end}": (states.png(), "image/png") for each in past + first for end in ("", "?thumbnail")
    }
    with opened(browser, fake.url) as page:
        page.get_by_label("Model").select_option("tiny-qwen-image")
        for size, time in (
            ("64x64", "11 s"),
            ("128x128", "20 s"),
            ("256x256", "40 s"),
            ("1024x1024", "5 min 20 s"),
        ):
            page.get_by_label("Size").fill(size)
            expect(page.locator("#cost")).to_contain_text(f"About {time} of rank time")


PUT_FILE = """([kind, content]) => {
  const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], "put.png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent("drop", { ...options, dataTransfer: files })
    : new ClipboardEvent("paste", { ...options, clipboardData: files });
  (document.querySelector("dialog[open]") ?? document.body).dispatchEvent(event);
}"""


def put(page: Any, kind: str, content: bytes) -> None:
    """Drop or paste a picture, once the page knows its models."""
    expect(page.locator("#model")).not_to_have_value("")
    page.evaluate(PUT_FILE, [kind, base64.b64encode(content).decode()])


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_start_image_is_dropped_or_pasted(browser, fake, kind):
    fake.accepted = states.job("new", position=1)
    with opened(browser, fake.url) as page:
        page.get_by_label("Model").select_option("tiny-qwen-image")
        put(page, kind, states.png())
        expect(page.get_by_role("img", name="Start image")).to_be_visible()
        expect(page.get_by_label("Model")).to_have_value("tiny-wan")
        expect(page.get_by_role("button", name="Draw a mask")).to_be_hidden()
        page.get_by_label("Prompt", exact=True).fill("it turns home")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_contain_text("Accepted, next in the queue")
        page.get_by_role("button", name="Remove the image").click()
        expect(page.locator("#image")).to_be_visible()
    assert fake.uploads == {"image": states.png()}


def painted(content: bytes) -> list[tuple[int, int]]:
    """The bounds of what is white in a mask: its first and last place in x and y."""
    with Image.open(io.BytesIO(content)) as mask:
        left, top, right, bottom = mask.convert("L").point(lambda light: 255 * (light > 127)).getbbox()
    return [(left, right), (top, bottom)]


def test_a_mask_is_painted_erased_and_sent_in_the_size_of_its_image(browser, fake):
    fake.mask_argument, fake.accepted = "mask_image", states.job("new", position=1)
    with opened(browser, fake.url) as page:
        put(page, "drop", states.png(size=(200, 100)))
        page.get_by_role("button", name="Draw a mask").click()
        box = page.locator("#mask").bounding_box()

        def drag(x0: float, x1: float) -> None:
            y = box["y"] + box["height"] / 2
            page.mouse.move(box["x"] + x0 * box["width"], y)
            page.mouse.down()
            page.mouse.move(box["x"] + x1 * box["width"], y, steps=4)
            page.mouse.up()

        drag(0.2, 0.8)
        page.get_by_role("radio", name="Erase").check(force=True)
        drag(0.5, 0.95)
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_role("button", name="Change the mask")).to_be_visible()
        page.get_by_label("Prompt", exact=True).fill("a hat")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_contain_text("Accepted")
        (left, right), (top, bottom) = painted(fake.uploads["files[mask_image]"])
        assert 25 <= left <= 40
        assert 85 <= right <= 100
        assert (top + bottom) // 2 in range(48, 53)
        page.get_by_role("button", name="Change the mask").click()
        page.get_by_role("button", name="Clear").click()
        half = Image.new("L", (200, 100))
        half.paste(255, (100, 0, 200, 100))
        content = io.BytesIO()
        half.save(content, "PNG")
        put(page, "drop", content.getvalue())
        page.get_by_role("button", name="Done").click()
        with page.expect_response("**/v1/jobs"):
            page.get_by_role("button", name="Submit").click()
        assert painted(fake.uploads["files[mask_image]"]) == [(100, 200), (0, 100)]


def test_a_job_file_is_uploaded(browser, fake):
    with opened(browser, fake.url, may_complain=True) as page:
        page.get_by_text("Job file", exact=True).click()
        content = b'{"prompt": "a fox"}\n{"prompt": "a boat"}\n'
        file = {"name": "night.jsonl", "mimeType": "application/jsonl", "buffer": content}
        page.locator("#job-file").set_input_files(file)
        fake.refusal = ApiError(400, "the job file: line 2: stepps: unknown", param="stepps")
        page.get_by_role("button", name="Send the file").click()
        expect(page.locator("#job-file-sent")).to_contain_text("line 2: stepps: unknown")
        fake.refusal = None
        page.get_by_role("button", name="Send the file").click()
        expect(page.locator("#job-file-sent")).to_have_text("2 jobs accepted.")


def test_mistakes_are_told_at_their_fields_without_asking(browser, fake):
    with opened(browser, fake.url) as page:
        expect(page.get_by_label("Steps")).to_have_value(
            "8"
        )  # the model's, which would come over what is typed
        page.get_by_label("Steps").fill("12.5")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Priority").fill("high")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_have_text("Correct 3 fields.")
        expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
        expect(page.locator("#steps-wrong")).to_have_text("A whole number from 1 to 1,000.")
        expect(page.get_by_label("Steps")).to_have_accessible_description("A whole number from 1 to 1,000.")
        expect(page.get_by_label("Priority")).to_have_attribute("aria-invalid", "true")
        page.get_by_label("Steps").fill("12")
        expect(page.locator("#steps-wrong")).to_have_text("")
        expect(page.get_by_label("Steps")).to_have_accessible_description("")
    assert fake.asked == []


def test_what_the_server_refuses_is_told_at_its_field(browser, fake):
    fake.refusal = ApiError(422, "width: this model takes multiples of 16", param="width")
    with opened(browser, fake.url, may_complain=True) as page:
        page.get_by_label("Prompt", exact=True).fill("a red fox")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_label("Size")).to_be_focused()
        expect(page.get_by_label("Size")).to_have_accessible_description("This model takes multiples of 16.")
        fake.refusal = ApiError(429, "1,000 jobs are open", retry_after_s=30)
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_have_text("1,000 jobs are open. Try again in 30 s.")
    first, second = (asked.key for asked in fake.asked)
    assert first == second, "the same job again, as far as the server needs to know"


def test_cancelling_keeps_the_focus_in_the_queue(browser, fake):
    fake.state = states.live(open=[states.job("fox", position=1), states.job("whale", position=2)])
    with opened(browser, fake.url) as page:
        button = page.get_by_role("button", name="Cancel prompt of fox")
        button.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Cancelling prompt of fox")).to_be_focused()
        fake.tell(
            open=[],
            order=["whale"],
            num_open=1,
            finished=[states.ended("fox", status="cancelled")],
            removed=[],
        )
        expect(page.get_by_role("button", name="Cancel prompt of whale")).to_be_focused()
    assert [(asked.method, asked.path) for asked in fake.asked] == [("POST", "/v1/jobs/fox/cancel")]


def test_cancel_all_asks_first(browser, fake):
    fake.state = states.live(open=[states.job(name, position=1) for name in ("fox", "whale", "boat")])
    with opened(browser, fake.url) as page:
        page.get_by_role("button", name="Cancel all").click()
        assert fake.asked == []
        page.get_by_role("button", name="Cancel 3 jobs?").click()
        expect(page.locator("#said")).to_have_text("3 jobs cancelled")
    assert {asked.path for asked in fake.asked} == {f"/v1/jobs/{n}/cancel" for n in ("fox", "whale", "boat")}


def test_cancel_all_asks_again_after_a_while(browser, fake):
    """It stayed armed until it lost the focus."""
    fake.state = states.live(open=[states.job(name, position=1) for name in ("fox", "whale")])
    with opened(browser, fake.url) as page:
        page.clock.install()
        page.get_by_role("button", name="Cancel all").click()
        expect(page.get_by_role("button", name="Cancel 2 jobs?")).to_be_visible()
        page.clock.run_for(5_000)
        page.get_by_role("button", name="Cancel all").click()
        assert fake.asked == []


def test_the_priority_of_a_waiting_job_changes(browser, fake):
    fake.state = states.live(open=[states.running("fox", 0), states.job("whale", position=1, priority=5)])
    with opened(browser, fake.url) as page:
        field = page.get_by_label("Priority of prompt of whale")
        expect(field).to_have_value("5")
        field.fill("high")
        field.press("Enter")
        expect(field).to_have_attribute("aria-invalid", "true")
        field.fill("8")
        field.press("Enter")
        expect(page.locator("#said")).to_have_text("Priority 8: prompt of whale")
        expect(page.get_by_label("Priority of prompt of fox")).to_be_hidden()
    assert [(asked.path, asked.fields) for asked in fake.asked] == [("/v1/jobs/whale", {"priority": 8})]


def test_running_jobs_come_before_paused_ones(browser, fake):
    fake.state = states.live(
        open=[states.running("paused", 0), states.running("fox", 1), states.job("whale", position=1)],
        ranks=[states.rank(0), states.rank(1, "fox")],
    )
    with opened(browser, fake.url) as page:
        expect(page.locator("#queue-count")).to_have_text("1 running, 1 paused, 1 waiting")
        prompts = page.locator("#queue .job-prompt")
        expect(prompts).to_have_text(["prompt of fox", "prompt of paused", "prompt of whale"])


def test_older_results_come_when_one_scrolls_and_stay(browser, fake):
    ended = [states.ended(f"job-{n}", status="failed", completed_at=1000 - n) for n in range(160)]
    fake.state, fake.stored = states.live(finished=ended[:48]), ended
    with opened(browser, fake.url) as page:
        expect(page.locator("#results-count")).to_contain_text("more below")
        scroll_to_end(page)
        expect(page.locator("#results-count")).to_have_text(re.compile("0 completed, (100|160) failed"))
        scroll_to_end(page)
        expect(page.locator("#results-count")).to_have_text("0 completed, 160 failed")
        expect(page.get_by_role("button", name="Show more")).to_be_hidden()
        newest = states.ended("new", status="failed", completed_at=2000)
        fake.tell(finished=[newest], removed=["job-47"])
        expect(page.locator("#results-count")).to_have_text("0 completed, 161 failed")
        scroll_to_end(page)
        tile = page.locator("#results .tile", has_text="prompt of job-159")
        expect(tile).to_have_attribute("aria-posinset", "161")


def scroll_to_end(page: Any) -> None:
    page.evaluate(
        """() => {
          const box = document.getElementById("results-scroll");
          box.scrollTop = box.scrollHeight;
        }"""
    )


def test_ten_thousand_results_keep_the_document_small(browser, fake):
    ended = [states.ended(f"job-{n}", status="failed", completed_at=20_000 - n) for n in range(10_000)]
    fake.state, fake.stored = states.live(finished=ended[:48]), ended
    with opened(browser, fake.url) as page:
        expect(page.locator("#results .tile").first).to_be_visible()
        page.locator("#results .tile-button").first.focus()
        while "more below" in page.locator("#results-count").inner_text():
            page.keyboard.press("End")
            settle(page)
        expect(page.locator("#results-count")).to_have_text("0 completed, 10000 failed")
        page.keyboard.press("End")
        last = page.get_by_role("button", name="prompt of job-9999, image, failed")
        expect(last).to_be_focused()
        expect(last).to_be_in_viewport()
        assert page.locator("#results .tile").count() < 60
        page.keyboard.press("Enter")
        expect(page.locator("#viewer-place")).to_have_text("10,000 of 10,000")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#viewer-prompt")).to_have_text("prompt of job-9998")
        page.keyboard.press("Escape")
        page.keyboard.press("Home")
        expect(page.get_by_role("button", name="prompt of job-0, image, failed")).to_be_focused()


FAKE_NOTICES = """
  window.notices = [];
  window.Notification = class extends EventTarget {
    static permission = "default";
    static requestPermission = async () => (Notification.permission = "granted");
    constructor(title, { body }) { super(); window.notices.push([title, body]); }
  };
  Object.defineProperty(document, "hidden", { get: () => window.isAway === true });
"""


def test_a_notification_comes_only_when_turned_on_and_away(browser, fake):
    with opened(browser, fake.url) as page:
        page.add_init_script(FAKE_NOTICES)
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        page.evaluate("window.isAway = true")
        fake.tell(finished=[states.ended("before", status="failed")])
        expect(page.locator("#results .tile")).to_have_count(1)
        page.get_by_role("button", name="Notify me").click()
        expect(page.get_by_role("button", name="Notify me", pressed=True)).to_be_visible()
        fake.tell(finished=[states.ended("boat", status="failed", prompt="a boat")])
        expect(page.locator("#results .tile")).to_have_count(2)
        expect(page.locator("#model")).not_to_have_value("")
        assert page.evaluate("window.notices") == [["Job failed", "A boat."]]


@pytest.fixture
def two(fake) -> FakeServer:
    """A server with the results fox (64 x 64) and whale (96 x 64)."""
    fox, whale = (states.png(), "image/png"), (states.png((20, 90, 160), size=(96, 64)), "image/png")
    fake.files |= {"fox": fox, "fox?thumbnail": fox, "whale": whale, "whale?thumbnail": whale}
    done = states.ended("fox", seed=11, size="512x384", tag="S", rank_s=8.0), states.ended("whale")
    fake.state = states.live(finished=list(done))
    line = {"prompt": "prompt of fox", "model": "tiny-qwen-image", "steps": 10, "width": 512, "height": 384}
    fake.lines = {"fox": json.dumps(line | {"seed": 2**62 + 1})}
    fake.accepted = states.job("new", position=1)
    return fake


def tile_of(page: Any, name: str) -> Any:
    return page.locator("#results").get_by_role("button", name=f"prompt of {name}")


def test_a_result_opens_and_its_settings_can_be_used_again(browser, two):
    with opened(browser, two.url) as page:
        tile = tile_of(page, "fox")
        tile.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#viewer-show img")).to_have_js_property("naturalWidth", 64)
        expect(page.locator("#viewer-facts")).to_contain_text("seed11")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#viewer-prompt")).to_have_text("prompt of whale")
        expect(page.locator("#viewer-place")).to_have_text("2 of 2")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Escape")
        expect(tile).to_be_focused()
        page.keyboard.press("Enter")
        page.locator("#viewer").get_by_role("button", name="Use again").click()
        expect(page.get_by_label("Seed")).to_have_value(str(2**62 + 1))
        expect(page.get_by_label("Size")).to_have_value("512x384")
        expect(page.get_by_label("Model")).to_have_value("tiny-qwen-image")


def test_the_newest_result_is_large_and_offers_what_one_does_next(browser, two):
    with opened(browser, two.url) as page:
        stage = page.get_by_role("figure", name="Newest result")
        expect(stage.locator("img")).to_have_js_property("naturalWidth", 64)
        assert stage.locator("img").bounding_box()["height"] > 300
        stage.get_by_role("button", name="Another seed").click()
        expect(page.locator("#sent")).to_have_text("Accepted, next in the queue.")
        stage.get_by_role("button", name="Use as start image").click()
        expect(page.get_by_role("img", name="Start image")).to_be_visible()
        expect(page.get_by_label("Model")).to_have_value("tiny-wan")
        page.get_by_label("Prompt", exact=True).fill("it runs away")
        with page.expect_response("**/v1/jobs"):
            page.get_by_role("button", name="Submit").click()
    seed, start = [asked.fields for asked in two.asked if asked.path == "/v1/jobs"]
    assert seed == {name: value for name, value in json.loads(two.lines["fox"]).items() if name != "seed"}
    assert start["image"] == "fox.png"
    assert two.uploads["image"] == two.files["fox"][0]


def test_another_seed_of_a_job_with_a_start_image_asks_for_the_image(browser, two):
    two.lines = {"fox": '{"prompt": "a fox", "image": "image.png", "seed": 7}'}
    with opened(browser, two.url) as page:
        page.get_by_role("button", name="Another seed").click()
        told = "Settings copied without the seed. Choose its start image again."
        expect(page.locator("#sent")).to_have_text(told)
        expect(page.get_by_label("Prompt", exact=True)).to_have_value("a fox")
        expect(page.get_by_label("Seed")).to_have_value("")
    assert two.asked == []


def test_another_seed_of_a_masked_job_asks_for_the_mask_too_and_a_missing_one_is_told_there(browser, two):
    two.mask_argument = "mask_image"
    files = {"image": "image.png", "files": {"mask_image": "x"}}
    two.lines = {"fox": json.dumps({"prompt": "a fox", "model": "tiny-wan", "seed": 7} | files)}
    with opened(browser, two.url, may_complain=True) as page:
        page.get_by_role("button", name="Another seed").click()
        told = "Settings copied without the seed. Choose its start image and mask again."
        expect(page.locator("#sent")).to_have_text(told)
        put(page, "drop", states.png())
        message = "files.mask_image: missing; FluxInpaintPipeline needs a picture"
        two.refusal = ApiError(422, message, param="files.mask_image")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#image-wrong")).to_have_text(
            "Mask: missing; FluxInpaintPipeline needs a picture."
        )
        expect(page.get_by_role("button", name="Draw a mask")).to_be_focused()
        two.refusal = ApiError(422, "image: too large", param="image")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#image-wrong")).to_have_text("Too large.")


def use_again(page: Any) -> None:
    """The newest result's settings."""
    page.locator("#stage").get_by_role("button", name="Use again").click()
    expect(page.locator("#sent")).to_contain_text("Settings copied.")


def test_a_picture_of_a_video_model_stays_a_picture_when_it_is_used_again(browser, two):
    """The form had the model's default length, so the picture became a video."""
    two.lines = {"fox": '{"prompt": "a fox", "model": "tiny-wan", "frames": 1, "priority": 0, "seed": 7}'}
    with opened(browser, two.url) as page:
        use_again(page)
        told = "Settings copied. Change the seed for a different result."
        expect(page.locator("#sent")).to_have_text(told)
        expect(page.get_by_label("Frames")).to_have_value("1")
        with page.expect_response("**/v1/jobs"):
            page.get_by_role("button", name="Submit").click()
    assert two.asked[0].fields["frames"] == "1"


def test_use_again_makes_the_form_that_of_the_job(browser, two):
    more = {"recipes": ["lightning-4"], "patches": ["ink", "oil"]}
    two.state.models = [states.MODELS[0], states.MODELS[1].model_copy(update=more)]
    asked = {
        "negative_prompt": "fog",
        "true_cfg_scale": 1.5,
        "recipe": "lightning-4",
        "priority": 4,
        "tag": "S",
    }
    line = {"prompt": "a {fox}", "model": "tiny-qwen-image", "width": 64, "height": 32, "seed": 7} | asked
    lora = [{"name": "oil", "scale": 0.5}]
    two.lines = {"fox": json.dumps(line | {"lora": lora, "sigmas": [1.0]})}
    with opened(browser, two.url) as page:
        page.get_by_label("Model").select_option("tiny-qwen-image")
        page.get_by_label("ink", exact=True).check()
        page.get_by_label("Steps").fill("12")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Deadline").fill("9s")
        page.get_by_label("How many").fill("3")
        use_again(page)
        expect(page.locator("#sent")).to_contain_text("Not copied, because the form lacks it: sigmas.")
        with page.expect_response("**/v1/jobs"):
            page.get_by_role("button", name="Submit").click()
        two.lines = {"fox": '{"prompt": "a boat", "model": "gone", "lora": [{"name": "gone"}], "seed": 8}'}
        use_again(page)
        expect(page.locator("#sent")).to_contain_text("lacks it: model, lora gone.")
        two.lines = {"fox": '{"prompt": "a boat", "model": "tiny-qwen-image", "seed": 8}'}
        use_again(page)
        expect(page.locator("#sent")).to_have_text("Settings copied. Change the seed for a different result.")
        with page.expect_response("**/v1/jobs"):
            page.get_by_role("button", name="Submit").click()
    first, second = (each.fields for each in two.asked)
    assert json.loads(first.pop("lora")) == lora
    texts = {name: str(value) for name, value in line.items() if name not in ("width", "height")}
    assert first == texts | {"size": "64x32"}
    own = {"prompt": "a boat", "model": "tiny-qwen-image", "seed": "8"}
    assert second == own | {"size": "256x256", "steps": "10"}


def test_a_refused_lora_is_told_at_the_loras(browser, two):
    two.state.models = [states.MODELS[1].model_copy(update={"patches": ["ink"]})]
    two.refusal = ApiError(422, "lora: ink fits no layer", param="lora")
    with opened(browser, two.url, may_complain=True) as page:
        page.get_by_label("Prompt", exact=True).fill("a fox")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#lora-wrong")).to_have_text("Ink fits no layer.")


def test_the_job_line_is_copied_whole(browser, two):
    with opened(browser, two.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.get_by_role("button", name="Copy job line").click()
        expect(page.locator("#said")).to_have_text("The job line is copied")
        copied = page.evaluate("navigator.clipboard.readText()")
    assert json.loads(copied) == json.loads(two.lines["fox"])


def test_two_results_are_compared_side_by_side(browser, two):
    with opened(browser, two.url) as page:
        for name in ("fox", "whale"):
            tile_of(page, name).focus()
            page.keyboard.press("x")
        expect(page.locator("#chosen-count")).to_have_text("2 chosen")
        assert page.locator("#chosen-save").get_attribute("href") == "v1/jobs/archive?ids=fox,whale"
        page.locator("#chosen").get_by_role("button", name="Compare").click()
        both = page.locator("#viewer-show img")
        expect(both).to_have_count(2)
        left, right = (each.bounding_box() for each in both.all())
        assert left["y"] == right["y"]
        assert left["x"] + left["width"] <= right["x"]
        page.get_by_role("button", name="Compare", pressed=True).click()
        expect(both).to_have_count(1)


def test_favourites_are_marked_and_shown_alone(browser, two):
    two.stored = [states.ended("old", status="completed", favourite=True, completed_at=5)]
    two.files |= dict.fromkeys(("old", "old?thumbnail"), (states.png(), "image/png"))
    with opened(browser, two.url) as page:
        tile_of(page, "whale").focus()
        page.keyboard.press("f")
        expect(page.locator("#said")).to_have_text("Favourite: prompt of whale")
        page.get_by_role("radio", name="Favourites").check(force=True)
        prompts = page.locator("#results .tile-prompt")
        expect(prompts).to_have_text(["prompt of whale", "prompt of old"])
        expect(page.locator("#stage")).to_be_hidden()
    favoured = [(asked.path, asked.fields) for asked in two.asked if asked.method == "PUT"]
    assert favoured == [("/v1/jobs/whale/favourite", {"value": True})]


def test_removing_a_file_asks_first(browser, fake):
    fake.files |= {name: (states.png(), "image/png") for name in ("fox", "fox?thumbnail")}
    fake.state = states.live(finished=[states.ended("fox")])
    with opened(browser, fake.url) as page:
        page.get_by_role("button", name="prompt of fox").click()
        page.get_by_role("button", name="Remove", exact=True).click()
        assert fake.asked == []
        page.get_by_role("button", name="Remove the file?").click()
        expect(page.locator("#viewer")).to_be_hidden()
        expect(page.locator("#results-title")).to_be_focused()
    assert [asked.path for asked in fake.asked] == ["/v1/jobs/fox"]


def test_a_job_that_is_picked_stands_out_until_escape(browser, fake):
    timeline = [states.bar("fox", 0, begin=-20), states.bar("whale", 1, begin=-20)]
    fake.state = states.live(open=[states.running("fox", 0), states.running("whale", 1)], timeline=timeline)
    with opened(browser, fake.url) as page:
        entry = page.locator("#legend button", has_text="prompt of fox")
        expect(entry).to_be_visible()
        settle(page)
        fox, whale, *_ = colours_of_lanes(page, 2, before_now_s=9)
        entry.focus()
        page.keyboard.press("Enter")
        settle(page)
        assert colours_of_lanes(page, 2, before_now_s=9)[0] == fox
        assert colours_of_lanes(page, 2, before_now_s=9)[1] != whale
        page.keyboard.press("Escape")
        settle(page)
        assert colours_of_lanes(page, 2, before_now_s=9) == [fox, whale]


def test_the_policy_is_changed_on_the_page(browser, fake):
    with opened(browser, fake.url) as page:
        page.get_by_label("Policy").select_option("edf")
        expect(page.locator("#said")).to_have_text("The policy is edf")
    assert fake.asked[0].fields == {"policy": "edf"}


# The line to the server -----------------------------------------------------------------------------


def test_a_lost_connection_is_seen_and_mended(browser, fake):
    fake.state = states.live(open=[states.running("fox", 0)])
    with opened(browser, fake.url, may_complain=True) as page:
        expect(page.locator("#status")).to_have_text("ready")
        fake.cut()
        expect(page.locator("#status")).to_have_text("connection lost")
        expect(page.get_by_role("alert")).to_contain_text("Connection lost.")
        expect(page.locator("#lost-when")).to_contain_text(re.compile("Trying again in (30|2[0-9]) s"))
        fake.state = states.live(open=[states.running("whale", 1)])
        fake.is_cut = False
        page.get_by_role("button", name="Try now").click()
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#lost")).to_be_hidden()
        expect(page.locator("#queue .job-prompt")).to_have_text("prompt of whale")
    assert fake.num_streams >= 2, "another stream began"


def test_the_page_asks_once_for_the_key(browser):
    with (
        FakeServer(states.live(), api_key="opensesame") as fake,
        opened(browser, fake.url, may_complain=True) as page,
    ):
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        page.keyboard.press("Escape")
        key.fill("sesame")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#key-dialog-wrong")).to_have_text("Wrong key.")
        key.fill("opensesame")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("ready")
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#key-dialog")).to_be_hidden()


# For everybody --------------------------------------------------------------------------------------


def busy_state() -> server_schemas.LiveState:
    now = states.time.time()
    return states.live(
        ranks=[states.rank(n, "fox", ranks=(0, 1)) if n < 2 else states.rank(n) for n in range(8)],
        open=[
            states.running(
                "fox",
                0,
                1,
                prompt="a red fox in the snow " * 9,
                deadline_at=now + 9,
                will_meet_deadline=False,
            ),
            *(
                states.job(
                    f"job-{n}", kind="video", position=n, deadline_at=now + 900, will_meet_deadline=True
                )
                for n in range(1, 9)
            ),
        ],
        timeline=[states.bar("fox", n, ranks=(0, 1)) for n in (0, 1)],
        finished=[states.ended(f"bad-{n}", status="failed") for n in range(5)],
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_light_and_dark(browser, fake, scheme):
    fake.state = busy_state()
    with opened(browser, fake.url, color_scheme=scheme) as page:
        expect(page.locator("#queue .job")).to_have_count(9)
        is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 17, 21)"
        assert is_dark == (scheme == "dark")
        assert page.evaluate(WEAK_TEXTS) == []


WEAK_TEXTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map((c) => linear(c / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(".unseen, script")) continue;
    const [ink, paper] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) weak.push(`${element.outerHTML}: ${contrast.toFixed(2)}`);
  }
  return weak;
}"""


def test_a_phone_needs_no_scrolling_sideways(browser, fake):
    fake.state = busy_state()
    with opened(browser, fake.url, viewport=PHONE, has_touch=True) as page:
        expect(page.locator("#queue .job").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        expect(page.locator("#queue .job:visible")).to_have_count(5)
        page.get_by_role("button", name="Show all 9").click()
        expect(page.locator("#queue .job:visible")).to_have_count(9)
        parts = ("results", "new", "queue", "timeline")
        tops = [page.locator(f".panel.{name}").bounding_box()["y"] for name in parts]
        assert tops == sorted(tops), "the results come first"
        expect(page.get_by_role("button", name="Submit")).to_be_in_viewport()


@pytest.mark.parametrize("size", [PHONE, {"width": 900, "height": 800}, DESKTOP])
def test_submit_the_count_and_the_cost_stay_in_view(browser, fake, size):
    fake.state = busy_state()
    with opened(browser, fake.url, viewport=size) as page:
        page.get_by_label("Prompt", exact=True).fill("a {red|blue} fox " + "in the snow " * 60)
        page.locator("#more").evaluate("more => (more.open = true)")
        expect(page.get_by_role("button", name="Submit 2 jobs")).to_be_in_viewport()
        expect(page.locator("#cost")).to_be_in_viewport()
        page.get_by_label("Seed").focus()
        expect(page.get_by_role("button", name="Submit 2 jobs")).to_be_in_viewport()
        lines = page.locator("#queue .job-prompt").first
        assert lines.bounding_box()["height"] < 60, "a long prompt is clamped"


def test_everything_is_reached_by_keyboard_and_seen_when_it_is(browser, fake):
    fake.state = busy_state()
    with opened(browser, fake.url) as page:
        expect(page.locator("#queue .job")).to_have_count(9)
        page.locator("#more").evaluate("more => (more.open = true)")
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            at = page.evaluate(
                """() => {
                  const at = document.activeElement;
                  const ring = getComputedStyle(at).outlineStyle !== "none" || at.closest(".span");
                  if (at === document.body) return null;
                  return [at.id || at.className || at.textContent, Boolean(ring)];
                }"""
            )
            if at is None:
                break
            reached.append(at[0])
            assert at[1], f"{at[0]} does not show that it has the focus"
        else:
            pytest.fail("the focus never leaves the page")
        assert {"policy", "prompt", "model", "size", "steps", "seed", "deadline", "priority", "send"} <= set(
            reached
        )
        assert sum(name == "quiet" for name in reached) == 9
        assert sum(name == "tile-button" for name in reached) == 1, "the arrow keys reach the others"
        assert reached.index("send") < reached.index("tile-button") < reached.index("queue-cancel")


def test_every_control_has_a_name(browser, fake):
    fake.state = busy_state()
    with opened(browser, fake.url) as page:
        expect(page.locator("#queue .job")).to_have_count(9)
        tree = page.locator("body").aria_snapshot()
        nameless = [
            line
            for line in tree.splitlines()
            if line.strip() in ("- button", "- textbox", "- combobox", "- progressbar")
        ]
        assert nameless == []


def test_what_changes_moves_nothing_else(browser, fake):
    fake.state = busy_state()
    with opened(browser, fake.url) as page:
        expect(page.locator("#queue .job")).to_have_count(9)
        settle(page)
        page.evaluate(
            """() => {
              window.shift = 0;
              const add = (list) => list.getEntries().forEach((each) => (window.shift += each.value));
              new PerformanceObserver(add).observe({ type: "layout-shift" });
            }"""
        )
        for step in range(4, 10):
            fake.tell(
                open=[states.running("fox", *range(step - 3), step=step)],
                ranks=[states.rank(n, "fox", ranks=range(step - 3)) for n in range(8)],
                timeline=[states.bar("fox", n, begin=-0.5, ranks=range(step - 3)) for n in range(step - 3)],
            )
            expect(page.locator("#queue progress").first).to_have_js_property("value", 10 * step)
        fake.cut()
        expect(page.locator("#lost")).to_be_visible()
        assert page.evaluate("window.shift") < 0.01


# The real server ------------------------------------------------------------------------------------


KEEP_PROGRESS = """() => {
  window.progress = new Set();
  const queue = document.getElementById("queue");
  const look = () => queue.querySelectorAll("progress").forEach((bar) => window.progress.add(bar.value));
  new MutationObserver(look).observe(queue, { subtree: true, attributes: true });
}"""


def test_a_job_is_submitted_watched_and_seen_and_another_cancelled(browser, server):
    slow = server.post(
        "/v1/videos", prompt="a fox that never ends", num_inference_steps=900, flow_shift=0.1
    ).json()
    with opened(browser, server.url) as page:
        expect(page.locator("#ranks li")).to_have_count(2)
        expect(page.locator("#queue .job", has_text="a fox that never ends")).to_contain_text(
            "of 900 on rank"
        )
        page.get_by_role("button", name="Cancel a fox that never ends").click()
        server.wait_for(slow["id"], "cancelled")
        expect(page.locator("#queue .job")).to_have_count(0)
        page.evaluate(KEEP_PROGRESS)
        page.get_by_label("Model").select_option("fake-image")
        page.get_by_label("Prompt", exact=True).fill("a whale")
        page.get_by_label("Steps").fill("1000")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#sent")).to_contain_text("Accepted")
        tile = page.locator("#stage").get_by_role("button", name="a whale, image, completed")
        expect(tile.locator("img")).to_have_js_property("naturalWidth", 16, timeout=30_000)
        assert any(0 < value < 100 for value in page.evaluate("[...window.progress]"))
        expect(page.locator("#legend")).to_contain_text("a whale")
        tile.click()
        expect(page.locator("#viewer-show img")).to_have_js_property("naturalWidth", 16)
