"""A stage of Ray Data that makes a picture or video of each row, in actors (docs/cluster.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gfgen.api import Session, told
from gfgen.errors import InputError, RunError, WorkerError
from gfgen.job.fields import FIELDS

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
        images, errors = np.empty((2, len(futures)), object)
        for number, future in enumerate(futures):
            try:
                images[number] = future.result().files[0]
            except WorkerError:
                raise
            except (InputError, RunError) as error:
                errors[number] = str(error)
        return {**batch, "image": images, "error": errors}

    def _fields_of(self, row: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(self._fields)
        for name, value in row:
            if value is not None and not (isinstance(value, float) and math.isnan(value)):
                fields[name] = str(value) if name == "id" else value
        return fields
