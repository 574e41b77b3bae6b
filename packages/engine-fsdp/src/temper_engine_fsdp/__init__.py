"""FSDPEngine: the Temper engine contract on PyTorch FSDP2."""
