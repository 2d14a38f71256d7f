"""Parameters that live on many ranks: FSDP2."""
