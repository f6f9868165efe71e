from benchmarks.auto import over_best, shape_of, sizes
from lightning_dpipe.planning.search import make_plan
from synthetic import FrozenChain, model_profile


def test_the_best_is_chosen_on_even_rounds_and_compared_on_odd_ones() -> None:
    times = {
        "S=1 M=1": [1.0, 2.0, 1.0, 2.0],  # lucky when it is chosen
        "S=2 M=4": [1.5, 1.5, 1.5, 1.5],
        "holdout_error_m8": [0.1, 0.1, 0.1, 0.1],  # no choice of the grid
        "auto": [0.5, 1.8, 0.5, 2.2],
    }
    assert over_best(times, "auto") == ("S=1 M=1", 1.0)


def test_the_profile_has_a_size_for_every_micro_batch_of_powers_of_two() -> None:
    graph = model_profile([1], frozen=(FrozenChain(name="text", forward_us=(1,)),)).graph
    assert sizes(graph) == {"text": (4, 8, 16, 32), "net": (2, 4, 8, 16, 32, 64)}


def test_buckets_on_one_device_are_shown_as_one_stage() -> None:
    profile = model_profile([10] * 4)
    plan = make_plan(profile, world_size=2, batch_size=4, num_stages=2, num_microbatches=3)
    assert shape_of(plan) == "S=2 M=3"
    plan = make_plan(profile, world_size=2, batch_size=4, num_stages=1, num_microbatches=3)
    assert shape_of(plan) == "S=1 M=3"
