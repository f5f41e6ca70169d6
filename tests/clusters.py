"""A Ray cluster that loses a node, and what the ranks of ``docs/examples`` have told of their steps."""

import json
from pathlib import Path
from typing import Any

# A cluster of one node that keeps order, and three with a worker each; one is lost when the file is there.
CLUSTER = """
import sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

address, lose = map(Path, sys.argv[1:])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
cluster.wait_for_nodes()
address.with_suffix(".new").write_text(cluster.address)
address.with_suffix(".new").rename(address)
while not lose.exists():
    time.sleep(0.005)
cluster.remove_node(nodes[-1], allow_graceful=False)
sys.stdin.read()
cluster.shutdown()
"""


def taken(folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks have told of their steps; one that was killed may have left half of a line."""
    lines = [line for path in folder.glob("taken-*") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]
