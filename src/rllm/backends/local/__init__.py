"""Training with torch on one machine: CPU, CUDA or MPS."""
