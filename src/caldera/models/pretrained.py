"""Hugging Face models with their weights, or without them but with the place of each weight."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from caldera.errors import UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.models.files import WeightFiles, find_weight_files
from caldera.seeds import derive_seed

logger = logging.getLogger(__name__)


# ---- Modules without values, and the values of parameters that no file holds

Reader = Callable[[], Tensor]
"""Reads or computes the value of one parameter."""


class WeightSource:
    """The value of every parameter of an empty module, one at a time.

    So a rank can fill its shards of a model that it could not hold whole.
    """

    def __init__(self, module: nn.Module, readers: Mapping[str, Reader]) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._readers = readers
        self._dtypes = {
            name: p.dtype for name, p in module.named_parameters(remove_duplicate=False)
        }

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
    parameters = list(module.named_parameters(remove_duplicate=False))
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


@dataclass(frozen=True)
class Recipe:
    """The recipe of a model: class, files, config, and the seed of missing weights."""

    factory: Any
    path: str
    config: PreTrainedConfig
    dtype: torch.dtype
    seed: int
    trust_remote_code: bool


@dataclass(frozen=True)
class Loaded:
    """A model, the names of what its files lack, and a reader of each value that is not in it."""

    model: PreTrainedModel
    missing: list[str]
    readers: dict[str, Reader]


def load_whole(recipe: Recipe) -> Loaded:
    """A model with all its weights, on the CPU."""
    with seeded(recipe.seed), _attention_by_name(recipe.config):
        model, told = recipe.factory.from_pretrained(
            recipe.path,
            config=recipe.config,
            dtype=recipe.dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=recipe.trust_remote_code,
            ignore_mismatched_sizes=True,  # which is reported below, in one line
            output_loading_info=True,
        )
    for name, held, wanted in sorted(told["mismatched_keys"]):
        raise ValueError(f"{name} is {tuple(held)} in its files and {tuple(wanted)} in the model")
    parameters = {name for name, _ in model.named_parameters()}
    fresh = parameters.intersection(told["missing_keys"])
    fill(model, {name: fresh_parameter(model, name, recipe.seed) for name in fresh})
    return Loaded(model, sorted(told["missing_keys"]), {})


def load_empty(recipe: Recipe) -> Loaded:
    """A model whose parameters are on the meta device, and readers of all their values."""
    files = find_weight_files(recipe.path)
    if files is not None:
        model = _build_empty(recipe)
        places = _places(model, files, recipe.config)
        if places is not None:
            return _with_readers(model, files, places, recipe.seed)
    logger.warning(
        "%s: its files do not hold the model's parameters one by one as safetensors, so the whole "
        "model is kept in host memory until it is distributed",
        recipe.path,
    )
    whole = load_whole(recipe)
    values = take_values(whole.model)
    readers: dict[str, Reader] = {name: partial(values.__getitem__, name) for name in values}
    return Loaded(whole.model, whole.missing, readers)


def _build_empty(recipe: Recipe) -> PreTrainedModel:
    with seeded(recipe.seed), parameters_on_meta(), _attention_by_name(recipe.config):
        model = recipe.factory.from_config(
            copy.deepcopy(recipe.config),
            dtype=recipe.dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=recipe.trust_remote_code,
        ).eval()
    if model.can_generate():
        model.generation_config = generation_config_of(recipe.path)
    return cast(PreTrainedModel, model)


@contextmanager
def _attention_by_name(config: PreTrainedConfig) -> Iterator[None]:
    """Refuse a model that looks for attention among its own kinds."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise UnsupportedError(
            f"models of the type {config.model_type} do not use the attention interface of "
            "transformers"
        ) from error


def generation_config_of(path: str) -> GenerationConfig:
    """That of the folder, or else the one in the model's config, as in `from_pretrained`."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True
        )


def _places(
    model: PreTrainedModel, files: WeightFiles, config: PreTrainedConfig
) -> dict[str, str | None] | None:
    """Under which name the files hold each parameter and buffer; None where they lack it.

    None altogether where loading means more than copying what has the same name and shape, which
    is left to transformers then. What may be missing is a value head.
    """
    if _is_converted(model, config):
        return None
    shapes = files.shapes()
    places: dict[str, str | None] = {}
    for tensor, names in _stored(model):
        held = [name for name in names if name in shapes]
        if any(shapes[name] != tuple(tensor.shape) for name in held):
            return None
        if not _all_equal(files, held):  # then transformers does not tie them
            return None
        if not held and not names[0].startswith(f"{VALUE_HEAD}."):
            return None
        places.update(dict.fromkeys(names, held[0] if held else None))
    return places


def _is_converted(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether transformers renames, merges, casts or quantises weights of such a model."""
    return bool(
        get_model_conversion_mapping(model, add_legacy=False)
        or (model.dtype != torch.float32 and model._keep_in_fp32_modules_strict)
        or getattr(config, "quantization_config", None)
        or getattr(config, "transformers_weights", None)
    )


def _stored(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Each tensor that belongs into a file, with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _all_equal(files: WeightFiles, names: list[str]) -> bool:
    return all(torch.equal(files.tensor(names[0]), files.tensor(name)) for name in names[1:])


def _with_readers(
    model: PreTrainedModel, files: WeightFiles, places: dict[str, str | None], seed: int
) -> Loaded:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    readers: dict[str, Reader] = {}
    for name, place in places.items():
        if place is None:
            readers[name] = fresh_parameter(model, name, seed)
        elif name in parameters:
            readers[name] = partial(_read, files, place, parameters[name].dtype)
        else:
            model.get_buffer(name).copy_(files.tensor(place))
    return Loaded(model, sorted(name for name in places if places[name] is None), readers)


def _read(files: WeightFiles, name: str, dtype: torch.dtype) -> Tensor:
    return files.tensor(name).to(dtype)


VALUE_HEAD = "score"
