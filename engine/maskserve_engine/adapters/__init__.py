"""Loading of LoRAs and ControlNets: files, device copies, and the text encoders' part."""
