"""LoRAs of jobs: checked before a run starts, merged where steps run."""
