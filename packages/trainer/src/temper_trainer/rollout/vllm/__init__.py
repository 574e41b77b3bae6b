"""The `vllm` sampler: servers in their own processes.

Only `vllm_engine`, `weight_transfer` and `expert_capture`, which run in a server, import vLLM. The
trainer's environment need not have it.
"""
