"""LoRAs and ControlNets in cached edits of the demo UNet."""
