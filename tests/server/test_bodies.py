"""What a request brings, and how much of it."""

from __future__ import annotations

import base64
import json

import pytest

from gfgen.server.http.bodies import _from_json
from gfgen.server.jobs.job_requests import picture_content
from gfgen.server.protocol.problems import ApiError

PICTURE = bytes(range(256)) * 12
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
BOUND = 400
ADDRESS = ["/v1/videos", ""]


def read(content, *, json_bytes=BOUND):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return _from_json(content, "input_reference", 1, json_bytes=json_bytes, read_file=no_files)


def no_files(name):
    raise AssertionError(name)


def picture_of(url):
    return picture_content(url, no_files, param="image")


def refused(content, **limits):
    with pytest.raises(ApiError) as told:
        read(content, **limits)
    return told.value.status


def with_slashes(content):
    """As PHP writes JSON."""
    return json.dumps(content).replace("/", "\\/").encode()


@pytest.mark.parametrize("given", [URL, {"image_url": URL}])
@pytest.mark.parametrize("written", [json.dumps, with_slashes, lambda value: json.dumps(value, indent=9)])
def test_a_picture_may_be_larger_than_all_the_rest(given, written):
    content = written({"seed": 7, "input_reference": given, "prompt": "a \\ fox"})
    body = read(content if isinstance(content, bytes) else content.encode())
    assert (body.values, body.file) == ({"seed": 7, "prompt": "a \\ fox"}, PICTURE)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "x" * BOUND},
        {"prompt": URL},
        {"input_reference": URL, "prompt": "x" * BOUND},
        {"input_reference": URL, "prompt": URL},
        {"input_reference": URL, "prompt": [URL[:60]] * 8},
        {"input_reference": URL[:60], "prompt": URL},
        {"input_reference": "https://example.com/" + "x" * BOUND},
        {"prompt": 'say "' + URL},
        {"prompt": URL + '" he said'},
        {URL: "prompt"},
        [0] * BOUND,
    ],
)
def test_the_rest_of_a_request_is_small_whatever_is_called_a_picture(values):
    assert refused(values) in (400, 413)


def test_what_is_no_json_is_no_request_with_a_large_picture_either():
    whole = json.dumps({"input_reference": URL}).encode()
    for content in (whole[:-1], whole[:-2], whole.replace(b"base64,", b"base64,\\x"), b"x" + whole):
        assert refused(content) in (400, 413)
    assert refused(whole.replace(b"base64,", b"base64,\n")) == 400
    assert refused(whole.replace(b"base64,", b"base64,\xff")) == 400
    assert refused({str(number): 0 for number in range(65)}, json_bytes=10**6) == 400
    assert refused(b'{"prompt": "a fox", "args": {"eta": 1, "eta": 2}}') == 400


def test_a_hash_tells_requests_apart_and_does_not_depend_on_how_they_are_read():
    one = {"prompt": "a fox", "input_reference": URL}
    other = {"prompt": "a fox", "input_reference": URL.replace("AAEC", "AAED", 1)}
    assert read(one).fingerprint(ADDRESS) == read(one, json_bytes=10**6).fingerprint(ADDRESS)
    several = (one, other, one | {"prompt": "x"}, {"prompt": "a fox"})
    prints = {read(values).fingerprint(ADDRESS) for values in several}
    assert len(prints) == 4


@pytest.mark.parametrize("kind", ["image/png;charset=utf-8", "application/octet-stream", "", "IMAGE/PNG"])
def test_a_data_url_may_be_wrapped_and_of_another_type(kind):
    url = f"data:{kind};base64,{base64.encodebytes(PICTURE).decode()}"
    assert picture_of(url) == picture_of(url.replace("\n", "\r\n")) == PICTURE
    assert read({"input_reference": url, "prompt": "a fox"}).file == PICTURE


@pytest.mark.parametrize("spoilt", ["=AAA", "AA=A", "A===", "AAA", "AA\nA", "AAA\u00e9"])
def test_spoilt_base64_is_refused(spoilt):
    assert picture_of(URL) == PICTURE
    for size in (0, 1, 2, 3, 5, 6, 7, 12):
        text = base64.b64encode(PICTURE[:size]).decode()
        assert picture_of(f"data:image/png;base64,{text}") == PICTURE[:size]
    for before, behind in (("", ""), ("AAAA", ""), ("", "AAAA"), ("AAAAAAAA", "AAAAAAAA")):
        with pytest.raises(ApiError, match="not base64"):
            picture_of(f"data:image/png;base64,{before}{spoilt}{behind}")
