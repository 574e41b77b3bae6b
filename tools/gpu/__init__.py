"""Measurements that need a CUDA host; run by hand from the root of the repository.

Programs, each with its options in its docstring; the other modules belong to one of them:

| program | measures | results in docs/benchmarks |
|---|---|---|
| `dense_models` | updates next to TRL and plain loops, experts, float8 | `dense_models.md` |
| `engine_fsdp` | FSDPEngine at 0.5B and 1.5B, heads, checks | `engine_fsdp.md` |
| `engine_megatron` | MegatronEngine: speed, layouts, conformance | `engine_megatron.md` |
| `train_arithmetic` | learning curves of whole runs | `train_gpu.md` |
| `trainer_vllm` | steps with vLLM servers, killed servers | `rollout.md` |
| `weight_sync` | transports of weights | `weight_sync.md` |
| `gpu_page_commands` | time and memory of the commands of docs/how-to/gpu.md and the README | |

`float8_engine` and `transformer_engine_engines` are for the conformance kit. `pack_wheels` packs
what a host without network lacks.
"""
