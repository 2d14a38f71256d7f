"""The loop: predict training steps by the simulator, run them for real, compare (`python -m sim calibrate --check`)."""
