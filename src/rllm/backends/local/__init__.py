"""Training with torch on one machine: CPU or CUDA."""
