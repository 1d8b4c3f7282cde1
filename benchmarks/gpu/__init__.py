"""Parts of the GPU benchmark `gpu_decode.py`: model shapes, loads, drivers, arms and tables."""
