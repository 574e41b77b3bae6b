"""The `vllm` sampler: servers in their own processes.

Only `vllm_engine` and `weight_transfer`, which run in a server, import vLLM. The trainer's
environment need not have it.
"""
