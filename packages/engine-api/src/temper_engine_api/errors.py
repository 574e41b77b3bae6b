"""What Temper raises. Every message says what was wrong, what was expected, and what to do.

TemperError
├── ConfigError(ValueError)             a setting is wrong, unknown, conflicting, or without effect
├── BatchError(ValueError)              a batch breaks the contract of its type
│   └── PlanError                       no plan satisfies the caps and the topology
├── CapabilityError                     the engine does not claim what was asked of it
├── EngineStateError(RuntimeError)      calls in an order that has no meaning
├── CollectiveTimeoutError(RuntimeError)  ranks waited for one that did not come
├── EngineNotFoundError(LookupError)    no engine of that name, or its import failed
│   └── ContractVersionError            the engine is built for another version of the contract
├── WeightError(ValueError)             names, shapes or checksums of a set of weights do not match
└── CheckpointError(RuntimeError)
    ├── IncompleteCheckpointError       a directory without its manifest: never committed
    └── DamagedCheckpointError          a file is missing, short, or its checksum differs
"""


class TemperError(Exception):
    """Root of every error that Temper raises on purpose."""


class ConfigError(TemperError, ValueError):
    """A setting is wrong, unknown, conflicting, or has no effect in this combination."""


class BatchError(TemperError, ValueError):
    """A batch breaks the contract of its type."""


class PlanError(BatchError):
    """No plan satisfies the token cap and the topology's constraints."""


class CapabilityError(TemperError):
    """The engine does not claim what was asked of it."""


class EngineStateError(TemperError, RuntimeError):
    """Calls came in an order that has no meaning, such as a second final call before ``optimizer_zero_grad``."""


class CollectiveTimeoutError(TemperError, RuntimeError):
    """Ranks waited longer than ``collective_timeout_s`` for one that did not come; names rank, stage and collective."""


class EngineNotFoundError(TemperError, LookupError):
    """No engine of that name is installed, or its import failed."""


class ContractVersionError(EngineNotFoundError):
    """The engine is installed, and built for another version of the contract."""


class WeightError(TemperError, ValueError):
    """Names, shapes, dtypes or checksums of a set of weights do not match."""


class CheckpointError(TemperError, RuntimeError):
    """A checkpoint can't be written or read."""


class IncompleteCheckpointError(CheckpointError):
    """A directory without its manifest: it was never committed."""


class DamagedCheckpointError(CheckpointError):
    """A committed file is missing, short, or its checksum differs."""
