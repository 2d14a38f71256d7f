"""The instruction set: what a rank's host thread issues (`program`), what its kernels do (`kernels`)."""
