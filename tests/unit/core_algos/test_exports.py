from __future__ import annotations

from caldera import core_algos


def test_the_package_exports_every_estimator_and_loss() -> None:
    exported = {id(getattr(core_algos, name)) for name in core_algos.__all__}
    for registry in (core_algos.ADV_ESTIMATORS, core_algos.POLICY_LOSSES):
        own = (registry[name] for name in registry)
        names = {id(item): getattr(item, "__name__", "compute_") for item in own}
        assert {item for item, name in names.items() if name.startswith("compute_")} <= exported
