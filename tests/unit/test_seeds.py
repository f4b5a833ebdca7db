from __future__ import annotations

from caldera.seeds import derive_seed


def test_seeds_are_a_function_of_root_and_place() -> None:
    # Seeds are part of a run's results, so they must not change between releases.
    assert derive_seed(42, "train", 1, 0, 0) == 6221790530572507591


def test_places_have_seeds_of_their_own() -> None:
    seeds = {
        derive_seed(root, s, p, r)
        for root in (1, 2)
        for s in range(9)
        for p in range(9)
        for r in range(9)
    }
    assert len(seeds) == 2 * 9**3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_parts_of_a_place_do_not_run_together() -> None:
    assert derive_seed(1, 11, 1) != derive_seed(1, 1, 11)
    assert derive_seed(1, "val", 1) != derive_seed(1, "train", 1)
