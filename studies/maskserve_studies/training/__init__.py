"""Training of the demo models: a tiny FLUX Fill, its LoRAs, its Inpaint kin and a tiny UNet."""
