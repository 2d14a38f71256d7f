"""How long does this kernel, copy or collective take, alone and under contention? Profiles are package data."""
