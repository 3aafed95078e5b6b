"""`gfgen run` with workers that compute nothing; all else of it is real.

    python -m fake_run run JOBS -o s3://...

Jobs make pictures of 16x16 in as many steps as they say; each takes `flow_shift` seconds. FAKE_LEASE_S in the
environment replaces how long a lease of a store lasts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_serving
from fault_plan import FaultFolder

from gfgen.cli.main import main
from gfgen.gfc.arena import ArenaPlan
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.publish import publisher
from gfgen.session.admission import Models
from gfgen.session.memory import HostMemory
from gfgen.session.session import Session


def load(session: Session, jobs: Sequence[AdmittedJob], **_: Any) -> None:
    folder = Path(session._stack.enter_context(tempfile.TemporaryDirectory()))
    FaultFolder(folder).begin(())
    pool = WorkerPool(
        RankSettings(num_ranks=2, plan=ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)),
        [folder],
        worker_main="fake_serving:work",
        preload=["fake_serving"],
        keep_fds=[session._lock],
    )
    session._pool = session._stack.enter_context(pool)
    wait_ready(pool, session.signals)


if __name__ == "__main__":
    Session.load = load  # type: ignore[method-assign]
    Models.look_up = lambda models, name: fake_serving.MODELS["fake-image"]  # type: ignore[method-assign]
    Models.try_calls = lambda models, jobs, **_: (jobs, ())  # type: ignore[method-assign]
    HostMemory.fit = lambda memory, jobs, **_: (jobs, ())  # type: ignore[method-assign]
    publisher.LEASE_S = float(os.environ.get("FAKE_LEASE_S", publisher.LEASE_S))
    main()
