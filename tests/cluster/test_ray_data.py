"""`gfgen.ray.Generate` as Ray Data calls it: an actor gets batches of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import gfgen
from gfgen import api, errors
from gfgen.session import feed, hosted

SMALL: dict[str, Any] = {"device": "cpu", "ranks": 1, "size": "64x64", "frames": 1, "steps": 1}


def map_batches(
    stage: type, rows: list[Mapping[str, Any]], *, batch_size: int, **options: Any
) -> list[dict[str, Any]]:
    """What Ray Data does with an actor: it is made once, and gets columns of `size` rows."""
    actor, made = stage(**options), list[dict[str, Any]]()
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        columns = {name: np.array([row[name] for row in part]) for name in part[0]}
        found = actor(columns)
        made += [{name: found[name][number] for name in found} for number in range(len(part))]
    return made


def test_rows_get_pictures_or_errors_and_keep_their_columns() -> None:
    rows: list[dict[str, Any]] = [
        {"key": number, "caption": f"a {colour} circle", "seed": seed, "label": colour}
        for number, (colour, seed) in enumerate([("red", 5.0), ("blue", float("nan")), ("pink", -7.0)])
    ]
    columns = {"id": "key", "prompt": "caption", "seed": "seed"}
    made = map_batches(gfgen.ray.Generate, rows, batch_size=2, columns=columns, **SMALL)
    assert [(row["key"], row["label"]) for row in made] == [(0, "red"), (1, "blue"), (2, "pink")]
    assert [row["error"] is None for row in made] == [True, True, False]
    assert "seed = -7" in made[2]["error"]
    assert made[2]["image"] is None
    alone = [{"id": row["key"], "prompt": row["caption"]} for row in rows[:2]]
    with gfgen.Session(device="cpu", ranks=1) as session:
        fields = {name: SMALL[name] for name in ("size", "frames", "steps")}
        first = session.submit(id="0", prompt="a red circle", seed=5, **fields).result()
        second = session.submit(**{**alone[1], "id": "1"}, **fields).result()
    assert [row["image"] for row in made[:2]] == [first.files[0], second.files[0]]


class Gone:
    """A process that ends once it has a job."""

    def __init__(self, module: str, setup: Any, heard: Any) -> None:
        self._heard = heard
        heard(hosted.Ready())

    def send(self, message: Any) -> None:
        if isinstance(message, hosted.Submit):
            assert message.fields == {"prompt": "a", "steps": 3}
            self._heard(feed.Gone(errors.WorkerError("its process was killed")))

    def close(self) -> None: ...


def test_the_end_of_the_process_fails_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "Process", Gone)
    stage = gfgen.ray.Generate(device="cpu", steps=3)
    with pytest.raises(errors.WorkerError, match="its process was killed"):
        stage({"prompt": np.array(["a"]), "other": np.array([1]), "id": np.array([None])})
    with pytest.raises(KeyError, match="caption"):
        gfgen.ray.Generate(columns={"prompt": "caption"})({"prompt": np.array(["a"])})
    with pytest.raises(errors.JobFileError, match="stpes: not a field"):
        gfgen.ray.Generate(stpes=3)
