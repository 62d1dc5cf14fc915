"""LoRAs on their way into the model: reading their files, and the text encoders' part."""
