"""Layers in files: Hugging Face directories, GGUF, GPTQ and AWQ."""
