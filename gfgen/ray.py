"""A stage of Ray Data that makes a picture or video of each row, in actors (docs/python.md).

ds.map_batches(
    gfgen.ray.Generate,
    fn_constructor_kwargs=dict(model="qwen-image", steps=8, columns={"prompt": "caption", "id": "key"}),
    batch_size=64,
    num_gpus=1,
    concurrency=8,
)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gfgen.api import Session, told
from gfgen.errors import InputError, RunError, WorkerError
from gfgen.job.fields import FIELDS
from gfgen.session.result import Result

if TYPE_CHECKING:
    import numpy as np


class Generate:
    """Adds two columns to a batch: `image`, the bytes of a row's file, and `error`, why it has none.

    columns: from fields of a job to columns; without it, each column with the name of a field.
    options: those of `gfgen.Session`, and fields of all jobs.
    Ids must differ within a batch. Without ids and seeds, equal prompts may get equal pictures.
    """

    def __init__(self, *, columns: Mapping[str, str] | None = None, **options: Any) -> None:
        """Load the models. Raises: errors of `gfgen.errors`."""
        own, jobs = told([], options)
        self._fields, self._columns = jobs.fallbacks, columns
        self._session = Session(**own).__enter__()

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Raises: WorkerError if the session has ended; KeyError for a column that is not there."""
        import numpy as np

        columns = self._columns or {name: name for name in batch if name in FIELDS}
        rows = zip(*(batch[column].tolist() for column in columns.values()), strict=True)
        futures = [self._session.submit(**self._fields_of(zip(columns, row, strict=True))) for row in rows]
        added = np.empty((len(futures), 2), object)
        for number, future in enumerate(futures):
            added[number] = _content(future)
        return {**batch, "image": added[:, 0], "error": added[:, 1]}

    def _fields_of(self, row: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Ids as texts; None and NaN are no values."""
        given = {name: str(value) if name == "id" else value for name, value in row if value == value}
        return {**self._fields, **{name: value for name, value in given.items() if value is not None}}


def _content(future: Future[Result]) -> tuple[bytes | None, str | None]:
    try:
        return future.result().files[0], None
    except WorkerError:
        raise
    except (InputError, RunError) as error:
        return None, str(error)
