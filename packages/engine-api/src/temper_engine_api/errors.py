"""Exceptions of Temper. A message says what is wrong, what was expected, and what to do.

TemperError
├── ConfigError(ValueError)             a setting is wrong, unknown, conflicting, or without effect
├── BatchError(ValueError)              a batch breaks a rule of its type
│   └── PlanError                       no plan satisfies the caps and the topology
├── CapabilityError                     the engine does not have a required capability
├── EngineStateError(RuntimeError)      methods were called in a wrong order
├── CollectiveTimeoutError(RuntimeError)  a collective timed out
├── RankFailedError(RuntimeError)       another rank raised, and the engine must be built again
├── MessageError(ValueError)            a gathered value or message is not supported
├── EngineNotFoundError(LookupError)    no engine of that name, or its import failed
│   └── ContractVersionError            it is built for another version of engine-api
├── WeightError(ValueError)             names, shapes or checksums of a set of weights do not match
└── CheckpointError(RuntimeError)
    ├── IncompleteCheckpointError       a directory without its manifest: never committed
    └── DamagedCheckpointError          a file is missing, short, or its checksum differs

`format_install` is the part of a message that says how to install a Temper package.
"""

import shlex


class TemperError(Exception):
    """Base class of all errors that Temper raises."""


class ConfigError(TemperError, ValueError):
    """A setting is wrong, unknown, conflicting, or has no effect in this combination."""


class BatchError(TemperError, ValueError):
    """A batch breaks a rule of its type, such as a column's shape."""


class PlanError(BatchError):
    """The token cap and the topology's constraints allow no plan."""


class CapabilityError(TemperError):
    """The engine does not claim a capability that the configuration or a call needs."""


class EngineStateError(TemperError, RuntimeError):
    """Methods were called in a wrong order, such as two final passes in one update."""


class CollectiveTimeoutError(TemperError, RuntimeError):
    """A collective took longer than `collective_timeout_s`; names rank, stage and collective."""


class RankFailedError(TemperError, RuntimeError):
    """A rank raised in a collective call, which broke the process group; names rank and message.

    The engine can't be used any more. See `temper_engine_api.distributed.rank_failures`.
    """


class MessageError(TemperError, ValueError):
    """A value cannot be gathered from ranks, or a rank sent something that is not such a value."""


class EngineNotFoundError(TemperError, LookupError):
    """The named engine is not installed, or its import failed."""


class ContractVersionError(EngineNotFoundError):
    """The engine is installed, but built for another version of temper-engine-api."""


class WeightError(TemperError, ValueError):
    """Weight names, shapes, dtypes or checksums do not match."""


class CheckpointError(TemperError, RuntimeError):
    """A checkpoint can't be written or read."""


class IncompleteCheckpointError(CheckpointError):
    """A directory without its manifest: it was never committed."""


class DamagedCheckpointError(CheckpointError):
    """A committed file is missing, short, or its checksum differs."""


def format_install(*requirements: str, command: str = "pip install") -> str:
    """Return how to install packages of Temper, from a clone and from wheels.

    Args:
        requirements: Names of packages with their extras.
        command: Installs into the environment in question.

    Example:
        >>> print(format_install("temper-trainer[ray]"))  # doctest: +NORMALIZE_WHITESPACE
        pip install './packages/trainer[ray]' in a clone of Temper (with its wheels in DIR: pip
        install --find-links DIR 'temper-trainer[ray]')
    """
    # Our packages are not on an index, so pip would not find their names without --find-links.
    paths = shlex.join(f"./packages/{name.removeprefix('temper-')}" for name in requirements)
    return (
        f"{command} {paths} in a clone of Temper (with its wheels in DIR: {command} --find-links "
        f"DIR {shlex.join(requirements)})"
    )
