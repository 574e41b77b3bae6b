"""The Temper engine on Megatron-Core and Megatron-Bridge; importing this imports neither."""
