"""Room for workers is counted node by node; nobody waits for a place that no node has."""

from types import SimpleNamespace

import pytest
import ray

import lt2_platform.train.on_ray.places
from lt2.config import ConfigError
from lt2_platform.train.config import Workers
from lt2_platform.train.on_ray import trainer
from lt2_platform.train.on_ray.places import check_places, kept_waiting, places, shortage, worker_request


def scaling(progress, **workers):
    return trainer._scaling(Workers(use_gpu=False, **workers), progress)


@pytest.fixture
def cluster(monkeypatch):
    """A function that makes Ray answer for nodes with these resources, of which these are free."""

    def make(*nodes, free=()):
        found = [
            {
                "NodeID": f"{i}",
                "NodeManagerHostname": f"node{i}",
                "Alive": node is not None,
                "Resources": {"CPU": 99} if node is None else node,
            }
            for i, node in enumerate(nodes)
        ]
        monkeypatch.setattr(ray, "nodes", lambda: found)
        left = {str(i): node for i, node in enumerate(free)}
        monkeypatch.setattr(lt2_platform.train.on_ray.places, "available_resources_per_node", lambda: left)

    return make


def test_places_are_counted_node_by_node(cluster):
    cluster({"CPU": 2}, {"CPU": 1}, {}, None)
    assert [places({"CPU": cpus}) for cpus in (0.5, 1, 1.5, 2, 3)] == [6, 3, 1, 1, 0]
    cluster({"CPU": 0.3})
    assert places({"CPU": 0.1}) == 3
    cluster({"CPU": 0.57})  # times 10,000 a little less than 5,700
    assert (places({"CPU": 0.57}), places({"CPU": 1e-5})) == (1, 5700)
    cluster({"CPU": 4, "GPU": 8}, {"CPU": 64}, {"CPU": 16, "GPU": 1})
    assert places({"CPU": 1, "GPU": 1}) == 5


def test_workers_that_fit_the_sum_but_no_node_are_refused(cluster):
    cluster({"CPU": 1}, {"CPU": 2})
    with pytest.raises(ConfigError) as refused:
        scaling(print, num_workers=1, cpus_per_worker=3)
    assert str(refused.value) == (
        "no room for 1 worker of 3 CPUs: the cluster has places for 0; its largest node, node1, has 2 CPUs; "
        "lower cpus_per_worker or add nodes"
    )
    with pytest.raises(ConfigError, match=r"2 workers of 1.5 CPUs: .* for 1; .* lower num_workers or add nodes"):
        scaling(print, num_workers=2, cpus_per_worker=1.5)
    with pytest.raises(ConfigError, match="lower min_workers or add nodes"):
        scaling(print, num_workers=4, min_workers=2, cpus_per_worker=1.5)
    assert scaling(print, num_workers=2, min_workers=1, cpus_per_worker=1.5).num_workers == (1, 2)


def test_the_setting_to_lower_is_that_of_who_asks(cluster):
    cluster({"CPU": 2})
    with pytest.raises(ConfigError, match="lower cpus_per_actor or add nodes"):
        check_places(1, {"CPU": 4}, "--actors", per_worker="cpus_per_actor")


def test_the_largest_node_is_that_with_most_gpus_and_a_head_without_cpus_cannot_be_asked_for_less(cluster):
    cluster({"CPU": 64}, {"CPU": 4, "GPU": 1})
    ray.nodes()[1]["NodeManagerHostname"] = ""
    with pytest.raises(ConfigError, match="for 0; its largest node, 1, has 4 CPUs and 1 GPU; lower num_workers or"):
        check_places(1, {"CPU": 1, "GPU": 2}, "num_workers")
    cluster({"CPU": 0})
    with pytest.raises(ConfigError, match="has 0 CPUs; lower num_workers or add nodes"):
        check_places(1, {"CPU": 1}, "num_workers")


def test_without_a_gpu_fewer_cpus_are_no_advice(cluster):
    cluster({"CPU": 2}, {"CPU": 8})
    with pytest.raises(ConfigError, match="node1, has 8 CPUs and 0 GPUs; lower num_workers or add nodes"):
        check_places(1, worker_request(1, None, use_gpu=True), "num_workers")


def test_a_worker_takes_half_a_cpu_where_they_are_scarce(cluster):
    cluster({"CPU": 2})
    assert worker_request(1, None, use_gpu=False) == {"CPU": 1}
    assert worker_request(2, None, use_gpu=False) == {"CPU": 0.5}
    cluster({"CPU": 4, "GPU": 8}, {"CPU": 64})  # plenty, but not beside the GPUs
    assert worker_request(4, None, use_gpu=True) == {"CPU": 1, "GPU": 1}
    assert worker_request(8, None, use_gpu=True) == {"CPU": 0.5, "GPU": 1}


def test_a_busy_cluster_is_named_once(cluster):
    heard = []
    cluster({"CPU": 2}, {"CPU": 2}, free=[{"CPU": 1}, {}])
    scaling(heard.append, num_workers=2, cpus_per_worker=1)
    assert heard == [{"waiting": "waiting for 2 places of 1 CPU: 1 CPU free"}]
    assert shortage(1, {"CPU": 1}) is None
    assert shortage(1, {"CPU": 1, "GPU": 1}) == "waiting for 1 place of 1 CPU and 1 GPU: 1 CPU and 0 GPUs free"


def test_a_wait_for_free_places_that_are_in_pieces_is_told_too(cluster):
    heard = []
    cluster({"CPU": 4}, {"CPU": 4}, free=[{"CPU": 3, "memory": 9}, {"CPU": 1}])
    scaling(heard.append, num_workers=2, cpus_per_worker=2)
    said = "waiting for 2 places of 2 CPUs: 4 CPUs free, but in pieces: its nodes have room for 1"
    assert heard == [{"waiting": said}]
    assert shortage(1, {"CPU": 2}) is None
    assert shortage(3, {"CPU": 2}) == "waiting for 3 places of 2 CPUs: 4 CPUs free"


def test_workers_wait_whose_own_places_ray_has_none_for(cluster, monkeypatch):
    cluster({"CPU": 2}, free=[{"CPU": 0.5}])
    group = {
        "state": "PENDING",
        "stats": {"scheduling_state": "NO_RESOURCES"},
        "bundles": {0: {"CPU": 1}, 1: {"CPU": 1}},
    }
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "02000000"))

    def waiting(job, **more):
        monkeypatch.setattr(
            lt2_platform.train.on_ray.places, "placement_group_table", lambda: {f"c7be{job}": group | more}
        )
        return kept_waiting()

    assert waiting("02000000") == "waiting for 2 places of 1 CPU: 0.5 CPUs free"
    assert waiting("01000000") is None  # another step's
    assert waiting("02000000", state="CREATED") is None
    assert waiting("02000000", stats={"scheduling_state": "QUEUED"}) is None
