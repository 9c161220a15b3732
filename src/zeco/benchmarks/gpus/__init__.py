"""What `benchmarks/multi_gpu.py` measures on all GPUs of a host, a process each."""
