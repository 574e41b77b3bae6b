"""The place of the Temper engine on Megatron-Core and Megatron-Bridge; it has no API yet."""
