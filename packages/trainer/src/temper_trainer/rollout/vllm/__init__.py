"""The ``vllm`` sampler: servers in processes of their own. Only ``engine`` and ``transfer``, which run there, import vLLM."""
