"""FSDPEngine: Temper's engine on PyTorch FSDP."""
