"""The contract between a trainer and a training engine: batches, objectives, plans, specs, checkpoints, and the laws.

Import from the submodules (``temper_engine_api.batch``, ``.engine``, ``.objective``, ...): this file imports nothing, so that a
configuration can be read without torch.
"""
