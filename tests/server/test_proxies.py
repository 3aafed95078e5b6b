"""A server behind a proxy, with other names for its models, and pages of other sites that may use it."""

from __future__ import annotations

import pytest
from serving import fake_server

PUBLIC = "https://films.example/gf"
SITE = "https://site.example"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    options = {"public_url": PUBLIC, "origin": SITE, "alias": "sora-2=fake-video", "access_log": 1}
    running = fake_server(tmp_path_factory.mktemp("proxied"), **options)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def test_a_model_has_another_name(proxied):
    listed = proxied.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [
        ("fake-video", None),
        ("fake-image", None),
        ("fake-edit", None),
        ("sora-2", "fake-video"),
    ]
    assert proxied.http.get("/v1/models/sora-2").json()["kind"] == "video"
    video = proxied.post("/v1/videos", prompt="a fox", model="sora-2", num_inference_steps=1).json()
    assert video["model"] == "fake-video"
    line = b'{"prompt": "a fox", "model": "sora-2", "steps": 1}'
    assert proxied.http.post("/v1/batches", content=line).status_code == 200
    missing = proxied.post("/v1/videos", prompt="a fox", model="sora-3").json()["error"]
    assert "there are fake-video, fake-image, fake-edit, sora-2" in missing["message"]


@pytest.mark.parametrize("prefix", ["", "/gf"])
def test_the_proxy_may_remove_its_prefix_or_leave_it(proxied, prefix):
    for path in ("/", "/page/page.js", "/v1/models", "/health"):
        assert proxied.http.get(prefix + path).status_code == 200
    refused = proxied.http.put(f"{prefix}/v1/videos")
    assert refused.status_code == 405


def test_the_prefix_alone_leads_to_the_page(proxied):
    answer = proxied.http.get("/gf", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/gf/")


def test_urls_of_results_are_public(proxied):
    values = {"prompt": "a fox", "response_format": "url", "num_inference_steps": 1}
    (image,) = proxied.post("/v1/images/generations", **values).json()["data"]
    assert image["url"].startswith(f"{PUBLIC}/v1/jobs/image_")
    assert proxied.http.get(image["url"].removeprefix("https://films.example")).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://films.example", "Host": "films.example"}, 200),
        ({"Origin": "https://films.example", "Host": "127.0.0.1:3000"}, 200),  # as nginx sends by default
        ({"Origin": "http://other.example", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": SITE, "Sec-Fetch-Site": "cross-site"}, 200),
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 400),
        ({"Host": ""}, 400),
    ],
)
def test_the_page_works_behind_a_proxy_and_other_sites_only_if_they_are_allowed(proxied, headers, status):
    body = {"prompt": "a fox", "num_inference_steps": 1}
    assert (
        proxied.http.post("/v1/jobs", json={"prompt": "x", "steps": 1}, headers=headers).status_code == status
    )
    assert proxied.http.post("/gf/v1/videos", json=body, headers=headers).status_code == status


def test_requests_have_ids_which_the_access_log_names(proxied):
    answers = [
        proxied.http.get(path, headers={"X-Request-ID": given})
        for path, given in (("/v1/models", "my-id-1"), ("/v1/jobs/x", "my-id-2"), ("/v1/models", "not an id"))
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[:2] == ["my-id-1", "my-id-2"]
    assert ids[2].startswith("req_")
    assert "GET /v1/models 200 in " in proxied.log
    (line,) = (line for line in proxied.log.splitlines() if "my-id-2" in line)
    assert "GET /v1/jobs/x 404 in " in line


def test_a_browser_asks_first_whether_a_site_is_allowed(proxied):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = proxied.http.options("/v1/videos", headers={"Origin": SITE} | asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, SITE)
    refused = proxied.http.options("/v1/videos", headers={"Origin": "https://evil.example"} | asked)
    assert "access-control-allow-origin" not in refused.headers
    answer = proxied.http.get("/v1/models", headers={"Origin": SITE})
    assert answer.headers["access-control-allow-origin"] == SITE
