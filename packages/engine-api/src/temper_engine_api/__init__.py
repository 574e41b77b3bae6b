"""The contract between a trainer and a training engine.

It defines batches, objectives, plans, engine settings and checkpoints, and has a conformance test
suite for engines. Import from the submodules (`temper_engine_api.batch`, `.engine`, `.objective`,
...): this file imports nothing, so that a configuration can be read without torch.
"""
