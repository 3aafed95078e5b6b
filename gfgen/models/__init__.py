"""Model families: torch-free geometry, and adapters over diffusers components."""
