"""Powers of singular values on Hopper GPUs: float64 where the digits are needed, float16 pairs where not."""
