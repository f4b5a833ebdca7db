"""The process-wide settings of DataProto, read from the environment when they are used."""

from __future__ import annotations

import os

from caldera.errors import ConfigError

AUTO_PADDING_VARIABLE = "VERL_AUTO_PADDING"
SERIALIZATION_VARIABLE = "VERL_DATAPROTO_SERIALIZATION_METHOD"
SERIALIZATION_METHODS = ("torch", "numpy")


class _AutoPaddingSwitch(type):
    """Makes `DataProtoConfig.auto_padding` a property of the class itself."""

    _override: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        if cls._override is not None:
            return cls._override
        return os.environ.get(AUTO_PADDING_VARIABLE, "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool | None) -> None:
        cls._override = enabled


class DataProtoConfig(metaclass=_AutoPaddingSwitch):
    """Settings that hold for every DataProto of the process.

    `DataProtoConfig.auto_padding` says whether a batch that does not divide evenly may be padded.
    It follows `VERL_AUTO_PADDING` until it is assigned; assigning None follows the variable again.
    """

    auto_padding_key = "_verl_auto_padding"
    """The `meta_info` flag that enables auto padding for one DataProto."""


def serialization_method() -> str:
    """How a pickled DataProto writes its tensors: "torch" (the default) or "numpy"."""
    method = os.environ.get(SERIALIZATION_VARIABLE) or "torch"
    if method not in SERIALIZATION_METHODS:
        raise ConfigError(
            f"{SERIALIZATION_VARIABLE}={method!r} is not a serialization method "
            f"(known: {', '.join(SERIALIZATION_METHODS)})"
        )
    return method
