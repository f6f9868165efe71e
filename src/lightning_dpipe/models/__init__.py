"""From diffusers and transformers modules to layers over named tensors."""
