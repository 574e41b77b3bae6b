"""Parameters sharded by FSDP1 or FSDP2."""
