"""Stable Diffusion 2.1 and SDXL: UNet2DConditionModel with sparse stacks."""
