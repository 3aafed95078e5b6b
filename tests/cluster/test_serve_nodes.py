"""`gfgen serve` with the nodes of a cluster: its HTTP is real, Ray and the nodes are not."""

import json
import time

from serving import fake_server


def test_one_server_uses_all_nodes(tmp_path):
    server = fake_server(tmp_path, nodes=2)
    try:
        server.wait_ready()
        answer = server.http.post("/v1/jobs", json=6 * [{"prompt": "a fox", "flow_shift": 0.2}])
        batch = answer.json()
        while server.http.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress":
            time.sleep(0.05)
        lines = server.http.get(batch["manifest_url"]).text.splitlines()
        made = [json.loads(line) for line in lines]
        assert [job["status"] for job in made] == 6 * ["done"]
        assert {name for job in made for name in job["warnings"]} == {"node-0", "node-1"}
        ranks = server.http.get("/v1/state").json()["ranks"]
        assert sorted(rank["node"] for rank in ranks) == ["node-0-1", "node-0-1", "node-1-2", "node-1-2"]
        metrics = server.http.get("/metrics").text
        assert all(f'node="{name}"' in metrics for name in ("node-0-1", "node-1-2"))
        assert server.stop() == 0
    finally:
        server.kill()
