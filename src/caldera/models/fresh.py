"""Modules without values, and the values of parameters that no file holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from caldera.seeds import derive_seed

Reader = Callable[[], Tensor]
"""Reads or computes the value of one parameter."""


class WeightSource:
    """The value of every parameter of an empty module, one at a time.

    So a rank can fill its shards of a model that it could not hold whole.
    """

    def __init__(self, module: nn.Module, readers: Mapping[str, Reader]) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._readers = readers
        self._dtypes = {name: p.dtype for name, p in _all_parameters(module)}

    def names(self) -> list[str]:
        """The names of the module's parameters, a tied one's first alone."""
        return self._names

    def tensor(self, name: str) -> Tensor:
        """The whole parameter on the CPU, in its dtype; a tied one goes by each of its names."""
        return self._readers[name]().to(self._dtypes[name])


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that are built meanwhile have no values; buffers have theirs."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else _emptied(parameter))

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def take_values(module: nn.Module) -> dict[str, Tensor]:
    """Leave the module without values; returns them, a tied one's under each of its names."""
    parameters = list(_all_parameters(module))
    emptied = {id(parameter): _emptied(parameter) for _, parameter in parameters}
    for name, parameter in parameters:
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = emptied[id(parameter)]
    return {name: parameter.detach() for name, parameter in parameters}


def fill(module: nn.Module, readers: Mapping[str, Reader]) -> None:
    """Give these parameters their values."""
    with torch.no_grad():
        for name, read in readers.items():
            module.get_parameter(name).copy_(read())


def fresh_parameter(model: PreTrainedModel, name: str, seed: int) -> Reader:
    """A reader of the value that transformers gives to a parameter that the files lack.

    Seed and name alone decide it.
    """
    path, _, leaf = name.rpartition(".")
    parents = [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
    modules = [model.get_submodule(parent) for parent in parents]
    builder = next((m for m in modules if isinstance(m, PreTrainedModel)), model)
    return initialised(modules[0], leaf, builder._init_weights, derive_seed(seed, name))


def initialised(
    owner: nn.Module, name: str, initialise: Callable[[nn.Module], None], seed: int
) -> Reader:
    """A reader of the value that `initialise` gives to a parameter of `owner`.

    The owner may change before the value is read: it is a copy that is initialised.
    """
    return partial(_initialise, _copy(owner, {}), name, initialise, seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of the CPU follow the seed meanwhile, and afterwards go on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _initialise(
    owner: nn.Module, name: str, initialise: Callable[[nn.Module], None], seed: int
) -> Tensor:
    empty = owner.get_parameter(name)
    value = nn.Parameter(torch.zeros_like(empty, device="cpu"), requires_grad=False)
    with seeded(seed), torch.no_grad():
        initialise(_copy(owner, {id(empty): value}))
    return value.detach()


def _copy(module: nn.Module, instead: Mapping[int, nn.Parameter]) -> nn.Module:
    """A copy without values, but for parameters that others stand in for, by their identity."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in module.parameters()
    }
    return copy.deepcopy(module, {**empty, **instead})


def _emptied(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:  # tied weights stay the same object
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)
