"""Any diffusers pipeline, one denoising step at a time: its own statements, cut at its denoising loop."""
