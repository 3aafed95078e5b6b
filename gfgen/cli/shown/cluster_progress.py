"""Progress of a run on several machines."""

from __future__ import annotations

from gfgen.cli.shown.progress import SUMMARY_S, LineProgress
from gfgen.cluster.ray_cluster import RayCluster
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.snapshot import Snapshot
from gfgen.system.wording import counted, in_words


class ClusterProgress(LineProgress):
    """Logs which node a job goes to, its end, and the state of the batch every SUMMARY_S."""

    def __init__(
        self, cluster: RayCluster, *, only_to_file: bool = False, with_failures: bool = True
    ) -> None:
        super().__init__(only_to_file=only_to_file, with_failures=with_failures)
        self._cluster = cluster

    def dispatched(self, dispatch: Dispatch) -> None:
        self._batch.dispatched(dispatch)
        job_id, node = dispatch.task.job_id, self._cluster.node_of(dispatch.layout)
        self._tell(f"{job_id} goes to node {node}", event="job_started", job=job_id, node=node)

    def refreshed(self, snapshot: Snapshot) -> None:
        if snapshot.now_s < self._next_summary_s:
            return
        self._next_summary_s = snapshot.now_s + SUMMARY_S
        batch, num_nodes = self._batch, len(self._cluster.joined)
        ended = f"{batch.num_ended}/{batch.num_jobs} jobs after {in_words(snapshot.now_s)}"
        self._tell(
            f"{ended}, {counted(num_nodes, 'node')} with {counted(self._cluster.num_ranks, 'rank')}",
            event="run_stands",
            ended=batch.num_ended,
            failed=batch.num_failed,
            jobs=batch.num_jobs,
            nodes=num_nodes,
        )
