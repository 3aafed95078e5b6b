"""Failures as clients are told of them."""

from __future__ import annotations

import pytest

from gfgen.server.protocol import picture_schemas
from gfgen.server.protocol.problems import ApiError, checked, without_folders


def test_a_wrong_size_of_a_picture_is_told_once():
    with pytest.raises(ApiError) as found:
        checked(picture_schemas.ImageRequest, {"prompt": "a fox", "size": "9x9"})
    assert str(found.value).startswith('size = "9x9": a text like "832x480"')
    assert "auto" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "model wan cannot be loaded: rank 0: OSError: no file named a.json found in directory /srv/wan.",
            "model wan cannot be loaded: rank 0: OSError: no file named a.json found in directory wan.",
        ),
        (
            "[Errno 2] No such file: '/srv/my models/wan/a.json' (load.py:3)",
            "[Errno 2] No such file: 'a.json' (load.py:3)",
        ),
        ('cannot read "~/models/wan/", nor (/tmp)', 'cannot read "wan", nor (tmp)'),
        ("/srv/out/a.png: OutputError: the disk is full", "a.png: OutputError: the disk is full"),
        (
            "1/2 of it and/or https://example.org/a/b at 3 MB/s",
            "1/2 of it and/or https://example.org/a/b at 3 MB/s",
        ),
    ],
)
def test_paths_are_cut_to_their_last_part_and_nothing_else_is(text, told):
    assert without_folders(text) == told
